"""The cost files, one TOML per device beside this module, and the costs that they give for a tile."""

from __future__ import annotations

import sys
from functools import cache
from importlib import resources
from typing import Any

from ..schedule.costs import FLOP_PER_ELEMENT, KV_MATMULS, Q_MATMULS, Costs, TwoPass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = resources.files(__package__)


def known_devices() -> tuple[str, ...]:
    """Devices that have a cost file."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in FOLDER.iterdir() if path.name.endswith(".toml")))


def numbers_of(device: str) -> dict[str, Any]:
    """What the cost file of a device says: `arch`, and (value, source, estimate) by name."""
    return tomllib.loads((FOLDER / f"{device}.toml").read_text(encoding="utf-8"))


@cache
def two_pass_percent(device: str, head_dim: int) -> tuple[int, bool]:
    """The time of a tile in two passes, in percent of its step in one, and whether that is an estimate.

    >>> two_pass_percent("h100", head_dim=64)
    (101, True)
    """
    entry = numbers_of(device)["two_pass_percent"][_up_to(head_dim)]
    return entry["value"], entry["estimate"]


def load_costs(device: str, *, block_m: int, block_n: int, head_dim: int, sms: int | None = None, ctas_per_sm: int = 1) -> Costs:
    """Costs of a device by name, for one tile size and padded head dim.

    sms overrides the number of the file: a real GPU tells its own (PCIe card, MIG slice). An unknown device raises
    ValueError.

    >>> load_costs("h100", block_m=64, block_n=128, head_dim=128).step_ns
    2796
    >>> load_costs("emulated", block_m=16, block_n=32, head_dim=64).workers
    6
    """
    if device not in known_devices():
        raise ValueError(f"no cost file for device {device!r}; known: {', '.join(known_devices())}")
    for name, value in (("sms", 1 if sms is None else sms), ("ctas_per_sm", ctas_per_sm)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    numbers = numbers_of(device)
    arch = numbers.pop("arch")
    if "tflops" in numbers:
        numbers["step_ns"] = _step(numbers, block_m * block_n * head_dim * FLOP_PER_ELEMENT, head_dim, ctas_per_sm)
    numbers["chain_ns"] = numbers["chain_ns"][_up_to(head_dim)]
    used = ("step_ns", "hop_ns", "shift_percent", "sms", "l2_bytes", "launch_ns", "chain_ns")
    return Costs(
        device=device,
        arch=arch,
        step_ns=numbers["step_ns"]["value"],
        hop_ns=numbers["hop_ns"]["value"],
        shift_percent=numbers["shift_percent"]["value"],
        workers=(sms or numbers["sms"]["value"]) * ctas_per_sm,
        l2_bytes=numbers["l2_bytes"]["value"],
        launch_ns=numbers["launch_ns"]["value"],
        chain_ns=numbers["chain_ns"]["value"],
        estimate=any(numbers[name]["estimate"] for name in used),
        sources={name: numbers[name]["source"] for name in used},
    )


def load_two_pass(
    device: str,
    *,
    block_m: int,
    block_n: int,
    kv_rows: int,
    q_rows: int,
    head_dim: int,
    split: bool = False,
    sms: int | None = None,
) -> TwoPass:
    """What two passes cost on a device, as `load`; block_m, block_n, kv_rows, q_rows and split are those of `TwoPass`.

    >>> two = load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=64)
    >>> two.kv_step_ns, two.q_step_ns
    (1276, 957)
    """
    numbers = numbers_of(device)
    percent, estimate = two_pass_percent(device, head_dim)
    rate = numbers["tflops"][_up_to(head_dim)] if "tflops" in numbers else numbers["step_ns"]

    def step(rows: int, columns: int, matmuls: int) -> int:
        def share(whole: int) -> int:
            return whole * percent * matmuls // (100 * (KV_MATMULS + Q_MATMULS))

        if "tflops" not in numbers:  # a step costs the same whatever its tile
            return max(1, share(rate["value"]))
        return _step(numbers, share(rows * columns * head_dim * FLOP_PER_ELEMENT), head_dim, 1)["value"]

    return TwoPass(
        block_m=block_m,
        block_n=block_n,
        kv_rows=kv_rows,
        q_rows=q_rows,
        kv_step_ns=step(kv_rows, block_m, KV_MATMULS + split) // (1 + split),
        q_step_ns=step(q_rows, block_n, Q_MATMULS),
        workers=sms or numbers["sms"]["value"],
        split=split,
        estimate=estimate or rate["estimate"],
    )


def _step(numbers: dict[str, Any], flop: int, head_dim: int, ctas_per_sm: int) -> dict[str, Any]:
    """step_ns from the device's TFLOPS, of which an SM has its share and a CTA its share of that."""
    rate = numbers["tflops"][_up_to(head_dim)]
    per_ns = rate["value"] * 1000  # FLOP per ns of the whole device
    step_ns = (flop * numbers["sms"]["value"] * ctas_per_sm + per_ns // 2) // per_ns
    return {"value": max(1, step_ns), "source": rate["source"], "estimate": rate["estimate"]}


def _up_to(head_dim: int) -> str:
    """The head dim of a file under which that of a tile falls."""
    return "128" if head_dim > 64 else "64"
