"""What only a fresh process shows: `import torch`, unchanged scripts, caches from one process to the next."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dash_inductor

ROOT = Path(dash_inductor.__file__).parents[1]


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Python in a process whose only settings are `environ`."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("DASH_INDUCTOR") and n != "TRITON_INTERPRET"}
    inherited.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    result = subprocess.run([sys.executable, *arguments], env=inherited | environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


def modules_after_import_torch(**environ: str) -> set[str]:
    return set(json.loads(python("-c", "import torch, sys, json; print(json.dumps(list(sys.modules)))", **environ).stdout))


def test_import_torch_stays_light():
    """Neither Inductor nor Triton nor anything large comes with the package."""
    added = modules_after_import_torch() - modules_after_import_torch(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "dash_inductor.hooks.install" in added, "the package is not installed with its entry points"
    assert {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names) == {"dash_inductor"}
    assert not added & {"dash_inductor.rewrite.sdpa", "dash_inductor.resolve", "dash_inductor.emulation.inductor"}
    assert "dash_inductor.rewrite.eager" not in added


def test_the_package_is_imported_before_torch():
    """Torch then comes with the first name that needs it, and loads the package's entry point in the middle of that."""
    code = "from dash_inductor import enabled; from dash_inductor.hooks import install; print(install._wanted)"
    found = python("-c", code)
    assert (found.stdout, found.stderr) == ("True\n", "")


LISTED = """
import torch
from torch.nn.attention import list_flash_attention_impls as names
before = "DASH" in names()
import dash_inductor
dash_inductor.enable()
print(before, "DASH" in names(), torch.nn.attention.current_flash_attention_impl())
"""


@pytest.mark.parametrize(
    ("environ", "output"),
    [
        ({"DASH_INDUCTOR": "0"}, "True True None"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "False True None"),
    ],
)
def test_listed_and_not_active(environ, output):
    """In torch's registry of flash attention, also where the package is switched off: activating it says so there."""
    assert python("-c", LISTED, **environ).stdout.strip() == output


def test_torch_logs():
    """TORCH_LOGS walks through all modules of the package, so none may contain itself."""
    code = "import torch, logging; print(logging.getLogger('dash_inductor').getEffectiveLevel() == logging.DEBUG)"
    assert python("-c", code, TORCH_LOGS="+dash_inductor").stdout == "True\n"


COMPILE = """
import torch
print("imported")
for _ in range(2):
    try:
        torch.compile(lambda x: x.view(-1))(torch.zeros(2))
        print("compiled")
    except Exception as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("before", "environ", "message"),
    [
        (
            "",
            {"DASH_INDUCTOR_SCHEDULE": "fifo"},
            "ValueError: DASH_INDUCTOR_SCHEDULE='fifo' is not one of auto, ascending, descending, shift, symmetric",
        ),
        (
            "import triton",
            {"DASH_INDUCTOR_EMULATE": "1"},
            "RuntimeError: emulation runs kernels in Triton's interpreter, which is off in this process: "
            "triton was imported before TRITON_INTERPRET=1 was set: set it when Python starts\n",
        ),
    ],
)
def test_what_cannot_be_had_is_raised_by_each_compilation(before, environ, message):
    """Not by `import torch`, and not by the first compilation alone."""
    output = python("-c", before + COMPILE, **environ).stdout
    assert output.startswith("imported\n")
    assert output.count(message) == 2
    assert "compiled" not in output


# A script that knows nothing of the package. One of its attentions can be rewritten.
SCRIPT = """
import logging, sys
import torch, torch.nn.functional as F

logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("dash_inductor").setLevel(logging.DEBUG)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
wide, narrow = torch.randn(3, 1, 2, 100, 16), torch.randn(3, 1, 1, 4, 264)

@torch.compile
def loss(wide, narrow):
    attention = F.scaled_dot_product_attention
    return attention(*wide.unbind(), is_causal=True).square().sum() + attention(*narrow.unbind()).sum()

leaves = [wide.requires_grad_(), narrow.requires_grad_()]
loss(*leaves).backward()
"""
# The same with FlexAttention, which the CPU trains under emulation alone.
WITH_FLEX = SCRIPT.replace(
    "@torch.compile\n",
    """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, 100, 100, device="cpu", BLOCK_SIZE=32)

@torch.compile
""",
).replace("return", "return flex_attention(*wide.unbind(), block_mask=mask).sin().sum() +")
REPORT = """
import dataclasses, json
import dash_inductor
from dash_inductor import emulation
from torch._dynamo.utils import counters

print(json.dumps({
    "package": dash_inductor.__file__,
    "counters": {**counters["inductor"], **counters["aot_autograd"]},
    "decisions": [dataclasses.asdict(decision) for decision in dash_inductor.decisions()],
    "gradients": [leaf.grad.flatten().tolist() for leaf in leaves],
    "seed": emulation.settings() and emulation.settings().seed,
    "turns": [launch.schedule for launch in emulation.launches()],
}))
"""


def report(tmp_path: Path, script: str = SCRIPT, **environ: str) -> tuple[dict[str, Any], list[str]]:
    """What `script` left behind, and the lines that the package logged."""
    path = tmp_path / "train.py"
    path.write_text(script + REPORT)
    result = python(str(path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), **environ)
    log = [line for line in result.stderr.splitlines() if line.startswith("dash_inductor: ")]
    return json.loads(result.stdout), log


def test_an_unchanged_script_and_its_caches(tmp_path):
    """DASH_INDUCTOR_EMULATE=1 is enough; a second process takes everything from the cache."""
    emulated = {"DASH_INDUCTOR_EMULATE": "1", "DASH_INDUCTOR_SEED": "3"}
    cold, log = report(tmp_path, WITH_FLEX, **emulated)
    assert cold["counters"]["fxgraph_cache_miss"] == 2
    assert cold["counters"].get("autograd_cache_hit", 0) == 0
    assert (cold["counters"]["dash_rewritten"], cold["counters"]["dash_declined"]) == (2, 1)
    assert cold["seed"] == 3
    assert len(cold["turns"]) == 2
    sdpa, flex, declined = sorted(cold["decisions"], key=lambda x: (x["reason"] is not None, x["mask"] == "block_mask"))
    assert (sdpa["q_len"], sdpa["heads"], sdpa["mask"], sdpa["reason"]) == (100, 2, "causal", None)
    assert (flex["q_len"], flex["heads"], flex["mask"], flex["reason"]) == (100, 2, "block_mask", None)
    assert (declined["q_len"], declined["head_dim"], declined["reason"]) == (4, 264, "head dim 264 is outside 1..256")
    assert log[0] == "dash_inductor: graph 0/0 of loss (backward): 2 attentions rewritten, 1 declined"
    assert len(log) == 4
    assert sum("keeps the stock kernel: head dim 264 is outside 1..256" in line for line in log) == 1

    warm, warm_log = report(tmp_path, WITH_FLEX, **emulated | {"DASH_INDUCTOR_SEED": "4"})
    assert warm["counters"].get("fxgraph_cache_miss", 0) == 0
    assert warm["counters"]["fxgraph_cache_hit"] == 2
    assert warm["counters"]["autograd_cache_hit"] == 1
    assert (warm["counters"]["dash_rewritten"], warm["counters"]["dash_declined"]) == (2, 1)
    assert warm["decisions"] == cold["decisions"]
    assert warm_log == log
    assert warm["seed"] == 4
    assert all(a != b for a, b in zip(warm["turns"], cold["turns"], strict=True)), "another seed, another interleaving"
    assert warm["gradients"] == cold["gradients"]


@pytest.mark.nightly
def test_other_sources_take_nothing_from_the_cache(tmp_path):
    tree = tmp_path / "tree"
    for package in ("dash_inductor", "lowering", "templates"):
        # In dash_inductor a checkout may have links to the other two.
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__", "lowering", "templates"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    emulated = {"DASH_INDUCTOR_EMULATE": "1", "DASH_INDUCTOR_SEED": "3", "PYTHONPATH": str(tree)}
    cold, _ = report(tmp_path, WITH_FLEX, **emulated)
    assert Path(cold["package"]).is_relative_to(tree)
    with (tree / "templates/preprocess.py.jinja").open("a") as template:
        template.write("\n")
    changed, _ = report(tmp_path, WITH_FLEX, **emulated)
    assert changed["counters"]["fxgraph_cache_miss"] == 2
    assert changed["counters"].get("fxgraph_cache_hit", 0) == 0
    assert changed["counters"].get("autograd_cache_hit", 0) == 0
    assert (changed["counters"]["dash_rewritten"], changed["counters"]["dash_declined"]) == (2, 1)
    assert changed["gradients"] == cold["gradients"]


@pytest.mark.nightly  # C++ is compiled, in two processes
def test_without_inductors_pattern_matcher(tmp_path):
    """Inductor leaves out our pass then; each attention says so, with warm caches too."""
    script = SCRIPT.replace("@torch.compile\n", '@torch.compile(options={"pattern_matcher": False})\n')
    assert script != SCRIPT
    for _ in range(2):
        found, log = report(tmp_path, script)
        assert [decision["reason"] for decision in found["decisions"]] == ["torch._inductor.config.pattern_matcher is off"] * 2
        assert (found["counters"].get("dash_rewritten", 0), found["counters"]["dash_declined"]) == (0, 2)
        assert sum("keeps the stock kernel: torch._inductor.config.pattern_matcher is off" in line for line in log) == 2
    assert found["counters"]["autograd_cache_hit"] == 1


def test_the_backend_without_autoload(tmp_path):
    """Emulation too is found by then, if Triton interprets, and before cache keys are made."""
    script = SCRIPT.replace("@torch.compile\n", '@torch.compile(backend="dash")\n')
    assert script != SCRIPT
    script += "torch._dynamo.reset()\nloss(*leaves).backward()\n"
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TRITON_INTERPRET": "1", "DASH_INDUCTOR_EMULATE": "1"}
    found, log = report(tmp_path, script, **environ)
    assert (found["counters"]["dash_rewritten"], found["counters"]["dash_declined"]) == (2, 2)
    assert (found["counters"]["autograd_cache_miss"], found["counters"]["autograd_cache_hit"]) == (1, 1)
    assert len(found["turns"]) == 2
    assert log[0] == log[3] == "dash_inductor: graph 0/0 of loss (backward): 1 attention rewritten, 1 declined"
    assert len(log) == 6


OFF = """
import warnings
import torch, torch.nn.functional as F

torch.use_deterministic_algorithms(True)
inputs = [torch.zeros(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for backend in ("inductor", "dash"):
        torch._dynamo.reset()
        torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=backend)(*inputs).sum().backward()
    import dash_inductor
    dash_inductor.enable()
print(*[warning.message for warning in caught if "DASH" in str(warning.message)], sep="\\n")
from torch._dynamo.utils import counters
from torch._inductor.codegen import common
print([name for name in counters["inductor"] if "dash" in name], "dash_inductor" in common.custom_backend_passes)
"""


@pytest.mark.parametrize("environ", [{}, pytest.param({"DASH_INDUCTOR_EMULATE": "1"}, marks=pytest.mark.nightly)])
def test_switched_off(tmp_path, environ):
    """DASH_INDUCTOR=0: plain Inductor everywhere, with one warning of the backend and one of enable(); nothing is emulated."""
    output = python("-c", OFF, DASH_INDUCTOR="0", TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **environ).stdout
    assert output.splitlines() == [
        'DASH_INDUCTOR=0: backend="dash" is plain Inductor',
        "DASH_INDUCTOR=0: dash_inductor stays off, torch.compile is plain Inductor",
        "[] False",
    ]
