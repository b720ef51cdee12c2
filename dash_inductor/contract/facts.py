"""What decides bits in a process, by name: those of attention, and those of everything else."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch._inductor import config as inductor_config

from ..config import current
from ..devices.cost_files import digest_of
from ..devices.modes import OF_TORCH, SDPA_KERNELS, mode
from ..first_use.machine import machine
from ..rewrite.stock_ops import active_implementation, is_strict

FROM_ENVIRONMENT = (  # libraries read these, and results may depend on them
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "TRITON_DEFAULT_FP_FUSION", "PYTHONHASHSEED"),
)
OF_INDUCTOR = (  # settings that are listed whether or not they have their default: what is chosen by timing, and who forbids that
    *("deterministic", "batch_invariant", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise"),
    *("coordinate_descent_tuning", "shape_padding", "benchmark_kernel", "benchmark_fusion", "fallback_random"),
    *("emulate_precision_casts", "force_same_precision", "split_reductions"),
)
NO_BITS = ("on_unsupported",)  # settings that decide code, and no bits of it
PLAIN = (bool, int, float, str, type(None))  # what a setting has to be, for its text to be that of another process too
PATH = re.compile(r"^[~/.]|^\w:\\")


def of_attention(device: torch.device) -> dict[str, str]:
    """Sources, versions, the GPU, settings and cost file, and torch's modes: all that the bits of attention may hang on."""
    settings = current()
    ours = {name: str(value) for name, value in settings.deciding() if name not in NO_BITS}
    ours["cost file"] = digest_of(settings.costs)[:16] or "the package's"
    torch_s = {"mode": "strict" if is_strict() else "warn_only", "flash attention": active_implementation() or "torch's"}
    return machine(device) | ours | torch_s


def of_the_rest() -> dict[str, str]:
    """torch's modes and precisions, settings of Inductor and variables: what the bits of all but attention may hang on too."""
    modes = {0: "off", 1: "warn_only", 2: "strict"}
    cuda = torch.backends.cuda
    found: dict[str, Any] = {
        "deterministic algorithms": modes[torch.get_deterministic_debug_mode()],
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads of the CPU": torch.get_num_threads(),
        "kernels of SDPA": ", ".join(name for name in SDPA_KERNELS if getattr(cuda, f"{name}_sdp_enabled")()),
        "CUDA of torch": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        **{f"torch.{name}": mode(name) for name in OF_TORCH},
        **{f"torch._inductor.config.{name}": value for name, value in _of_inductor().items()},
        **{name: os.environ.get(name) for name in FROM_ENVIRONMENT},
    }
    return {name: str(value) for name, value in found.items()}


def _of_inductor() -> dict[str, Any]:
    """OF_INDUCTOR, and what has another value than its default. What decides no code, by torch, objects and paths are left out."""
    settings: dict[str, Any] = inductor_config.save_config_portable()  # type: ignore[attr-defined]
    entries: dict[str, Any] = inductor_config._config  # type: ignore[attr-defined]
    changed = sorted(name for name, value in settings.items() if value != entries[name].default)
    values = {name: settings[name] for name in dict.fromkeys([*OF_INDUCTOR, *changed]) if name in settings}
    return {name: x for name, x in values.items() if isinstance(x, PLAIN) and not (isinstance(x, str) and PATH.match(x))}
