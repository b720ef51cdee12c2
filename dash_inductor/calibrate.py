"""The `calibrate` command: measures the cost constants of the GPU that is there, and writes its cost file.

It never runs by itself: a choice depends on the cost file, and bits may depend on the choice.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from .calibration import Constants, Timing, TwoPassTiming, fit, percent_of
from .devices import key_for
from .schedule.costs import FLOP_PER_ELEMENT, FOLDER, numbers_of
from .templates.tiles import tile as one_pass_tile
from .templates.tiles import two_pass_tile

HEAD_DIMS = (64, 128)
ROUNDS = (1, 4)
LAUNCHES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `calibrate`."""
    parser.add_argument("--device-out", metavar="FILE", help="where to write (default: the device's own cost file)")


def main(args: argparse.Namespace) -> int:
    """Measure, fit, write; ValueError where there is no GPU to measure."""
    import torch

    from .target import target_of

    if not torch.cuda.is_available():
        raise ValueError("calibrate measures a GPU, and torch.cuda.is_available() is False here")
    target, gpu = target_of(torch.device("cuda")), torch.cuda.get_device_name()
    path = file_of(target, gpu, args.device_out)
    found = {d: fit(timings(target, d)) for d in HEAD_DIMS}
    percent = {d: measured_percent(target, d, constants.step_ns) for d, constants in found.items()}
    for d, constants in found.items():
        print(f"head dim {d}: {constants}, two passes {percent[d]} %")
    path.write_text(cost_file(target, found, percent, gpu), encoding="utf-8")
    print(f"written: {path}")
    return 0


def file_of(target: Any, gpu: str, asked: str | None) -> Path:
    """Where to write; ValueError for a GPU without a cost file of its own, unless a file is asked for."""
    if asked is None and key_for(gpu, target.arch) is None:
        raise ValueError(f"{gpu} has no cost file of its own, it takes that of {target.key}: name one by --device-out")
    return Path(asked or str(FOLDER / f"{target.key}.toml"))


def timings(target: Any, head_dim: int) -> list[Timing]:
    """Launches of ascending and shift: heads a multiple of floor(P / n), Q and KV lengths varied apart."""

    tile = one_pass_tile(target.arch, "bf16", head_dim)
    workers = target.sms * tile.ctas_per_sm
    found = []
    for n_kv in (workers // 8, workers // 4, workers // 2):
        for n_q in (2 * n_kv, 256):
            for rounds in ROUNDS:
                heads = rounds * (workers // n_kv)
                for family in ("ascending", "shift"):
                    found.append(measure(target, tile, head_dim, family, n_q, n_kv, heads))
    return found


def measure(target: Any, tile: Any, head_dim: int, family: str, n_q: int, n_kv: int, heads: int) -> Timing:
    """The main kernel's time under a family."""
    from .target import Tiles, resolve

    sizes = {"q_len": n_q * tile.block_m, "kv_len": n_kv * tile.block_n, "heads": heads}
    with _settings(schedule=family):
        plan = resolve(target, Tiles(tile, None), **sizes, group=1, mask="full").plan
        longest, *_ = kernel_times(head_dim, **sizes)
    return Timing(family, n_q, n_kv, heads, plan.schedule.roles, plan.heads_in_flight, longest)


def measured_percent(target: Any, head_dim: int, step_ns: float) -> int:
    """The time of a tile in two passes, in percent of its step in one: of launches whose CTAs come in whole waves."""
    one, two = one_pass_tile(target.arch, "bf16", head_dim), two_pass_tile(target.arch, "bf16", head_dim)
    # Two heads fill the SMs with CTAs of either kind, or some times over.
    length = target.sms // 2 * math.lcm(two.kv_rows, two.q_rows)
    found = []
    for rounds in ROUNDS:
        heads = 2 * rounds
        with _settings(template="two_pass"):
            longest, *_ = kernel_times(head_dim, q_len=length, kv_len=length, heads=heads)
        tiles = heads * (length / one.block_m) * (length / one.block_n) / (target.sms // 2 * 2)
        found.append(TwoPassTiming(tiles, longest))
    return percent_of(*found, step_ns=step_ns)


def _settings(**changed: str) -> Any:
    from . import enabled

    return enabled(guarantee="run", on_unsupported="error", **changed)


def kernel_times(head_dim: int, *, q_len: int, kv_len: int, heads: int) -> list[float]:
    """Median times in ns of the kernels in the backward of one compiled attention, the longest first."""
    import torch
    from torch._functorch import config as functorch_config
    from torch.profiler import ProfilerActivity, profile

    query, key, value = (
        torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for length in (q_len, kv_len, kv_len)
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        # The graph is kept between backwards, which donated buffers do not allow.
        with functorch_config.patch(donated_buffer=False):
            out = torch.compile(torch.nn.functional.scaled_dot_product_attention, dynamic=False)(query, key, value)
            grad = torch.randn_like(out)
            torch.autograd.backward(out, grad, retain_graph=True)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for _ in range(LAUNCHES):
                    torch.autograd.backward(out, grad, retain_graph=True)
                torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(deterministic)
    times: dict[str, list[float]] = {}
    for event in profiled.events():
        times.setdefault(event.name, []).append(1000 * event.device_time)  # us to ns
    ours = sorted((t for name, t in times.items() if name.startswith("triton_tem_")), key=sum, reverse=True)
    if not ours or any(len(launches) != LAUNCHES for launches in ours):
        raise ValueError(f"the profiler saw {[len(t) for t in ours]} launches of our kernels, not {LAUNCHES} of each")
    return [statistics.median(launches) for launches in ours]


def cost_file(target: Any, found: dict[int, Constants], percent: dict[int, int], gpu: str) -> str:
    """The TOML of the device: what was fitted in place of what its file says now."""

    numbers = numbers_of(target.key)
    arch = numbers.pop("arch")
    source = f"fitted by `python -m dash_inductor calibrate` on one {gpu}, {target.sms} SMs, bf16"

    def entry(name: str, value: int, said: str, estimate: bool) -> str:
        return f'[{name}]\nvalue = {value}\nsource = "{said}"\nestimate = {str(estimate).lower()}\n'

    parts = [f'# Cost constants of the model for the {gpu}. The unit of each is in its name.\narch = "{arch}"\n']
    for name in ("sms", "l2_bytes"):
        parts.append(entry(name, numbers[name]["value"], numbers[name]["source"], numbers[name]["estimate"]))
    for d, constants in found.items():
        tile = one_pass_tile(target.arch, "bf16", d)
        flop = tile.block_m * tile.block_n * tile.block_d * FLOP_PER_ELEMENT
        # The file's SMs, by which it is read again: the constant is one SM's.
        tflops = round(flop * numbers["sms"]["value"] * tile.ctas_per_sm / constants.step_ns / 1000)
        said = f"{source}: {constants.step_ns:.0f} ns a step, fit {constants.error:.1%} off"
        parts.append(entry(f"tflops.{d}", tflops, said, False))
    for name in ("hop_ns", "shift_percent", "launch_ns"):
        values = [getattr(constants, name) for constants in found.values()]
        each = ", ".join(f"{value:.0f} at d = {d}" for d, value in zip(found, values, strict=True))
        parts.append(entry(name, max(0, round(statistics.fmean(values))), f"{source}: {each}", False))
    for d, constants in found.items():
        parts.append(entry(f"chain_ns.{d}", max(0, round(constants.chain_ns)), source, False))
    for d, value in percent.items():
        parts.append(entry(f"two_pass_percent.{d}", value, source, False))
    return "\n".join(parts)
