"""Measures the cost constants of the GPU that is there, and writes a cost file of it.

Nothing takes that file by itself: the choice of a schedule depends on it, and the bits of dQ may depend on the choice.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.profiler import ProfilerActivity, profile

from ..codegen.mode import deterministic
from ..config import TRITON, Config, current
from ..devices.calibration import Constants, Timing, TwoPassTiming, fit, percent_of
from ..devices.cost_files import OF_GLUON, mean_steps, numbers_of
from ..devices.target import Target, target_of
from ..first_use.machine import sources_digest
from ..hooks.install import enabled
from ..problem import Problem
from ..resolve import resolve
from ..schedule import TWO_PASS
from ..schedule.costs import FLOP_PER_ELEMENT
from ..templates.tiles import Tile, two_pass_tile
from ..templates.tiles import tile as one_pass_tile
from .runner import child, run_together

TIMINGS, COSTS = "timings.jsonl", "costs.toml"
Fitted = tuple[Constants, "int | None"]  # and the percent of two passes, where they were measured
HEAD_DIMS = (128, 64)
ROUNDS = (1, 4)
LAUNCHES = 20


def run(folder: Path, seconds: float, jobs: int) -> int:
    """Measures, and writes TIMINGS and COSTS into a folder, the latter again after each head dim; 1 if one is not complete.

    Nothing is begun after `seconds`, half of which may be spent on compiling in `jobs` processes first. What TIMINGS has is not
    measured again.

    Raises:
        ValueError: TIMINGS is of something else, or nothing could be fitted.
    """
    target = target_of(torch.device("cuda"), replace(current(), costs=""))
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    session = Session(target.key, torch.cuda.get_device_name(), int(target.arch), target.sms, l2_bytes, sources_digest())
    launches = [launch for head_dim in HEAD_DIMS for launch in launches_of(target, head_dim)]
    timings = folder / TIMINGS
    known = kept(timings, session)
    deadline = time.monotonic() + seconds
    if jobs > 0:
        compile_first([launch for launch in launches if launch not in known], jobs, seconds / 2)
    why: dict[int, str] = {}
    for head_dim in HEAD_DIMS:
        for launch in (launch for launch in launches if launch.head_dim == head_dim and launch not in known):
            if time.monotonic() >= deadline:
                why[head_dim] = "the time limit"
                break
            known[launch] = measure(launch)
            keep(timings, session, launch, known[launch])
            shape = f"{launch.heads} heads, {launch.q_len} x {launch.kv_len}"
            print(f"  head dim {head_dim}, {launch.family}, {shape}: {known[launch] / 1000:.1f} us")
        fitted, refused = fits(known, session)
        if fitted:
            (folder / COSTS).write_text(cost_file(session, fitted), encoding="utf-8")
    incomplete = {d: why.get(d) or refused[d] for d in HEAD_DIMS if d in why or d in refused}
    reasons = "; ".join(f"head dim {head_dim}: {reason}" for head_dim, reason in incomplete.items())
    if not fitted:
        raise ValueError(f"no cost file: no head dim could be fitted ({reasons})")
    if incomplete:
        print(f"not complete: {reasons}")
    return int(bool(incomplete))


@dataclass(frozen=True)
class Session:
    """What a file of timings is of: its first line."""

    key: str
    gpu: str
    arch: int
    sms: int
    l2_bytes: int
    sources: str  # their digest


@dataclass(frozen=True)
class Launch:
    """One backward to be measured, bf16, full mask, batch 1.

    `family` is ascending or shift, with the roles and heads in flight that the plan has; or two_pass, with none.
    """

    head_dim: int
    family: str
    q_len: int
    kv_len: int
    heads: int
    roles: int
    heads_in_flight: int


def kept(path: Path, session: Session) -> dict[Launch, float]:
    """The ns that a file has; ValueError if they are of another GPU or another version of the kernels."""
    if not path.exists():
        return {}
    other, timings = read_timings(path)
    if other != session:
        raise ValueError(f"{path} holds timings of another GPU, or of other kernels: name another file")
    whole, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
    if rest:  # of a run that was killed
        path.write_text(whole + "\n", encoding="utf-8")
    return timings


def read_timings(path: Path) -> tuple[Session, dict[Launch, float]]:
    """What `keep` wrote; a last line that was cut short is left out. ValueError for what is no such file."""
    first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
    try:
        session = Session(**json.loads(first))
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return session, {Launch(**entry["launch"]): float(entry["ns"]) for entry in entries}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no file of timings") from None


def keep(path: Path, session: Session, launch: Launch, ns: float) -> None:
    """Appends a timing."""
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if new:
            file.write(json.dumps(asdict(session)) + "\n")
        file.write(json.dumps({"launch": asdict(launch), "ns": ns}) + "\n")


def launches_of(target: Target, head_dim: int) -> list[Launch]:
    """Ascending and shift, heads a multiple of floor(P / n), Q and KV lengths varied apart; and two passes in whole waves."""
    tile, two = one_pass_tile(target.arch, "bf16", head_dim), two_pass_tile(target.arch, "bf16", head_dim)
    workers = target.sms * tile.ctas_per_sm
    launches = []
    for n_kv in (workers // 8, workers // 4, workers // 2):
        for n_q in (2 * n_kv, 256):
            for rounds in ROUNDS:
                sizes = {"q_len": n_q * tile.block_m, "kv_len": n_kv * tile.block_n, "heads": rounds * (workers // n_kv)}
                for family in ("ascending", "shift"):
                    problem = Problem("full", 1, sizes["heads"], sizes["heads"], sizes["q_len"], sizes["kv_len"], head_dim, "bf16")
                    plan, _ = resolve(problem, Config(schedule=family, kernel=TRITON), target).schedule
                    launches.append(Launch(head_dim, family, **sizes, roles=plan.roles, heads_in_flight=plan.heads_in_flight))
    # Two heads fill the SMs with CTAs of either kind, or some times over.
    length = target.sms // 2 * math.lcm(two.kv_rows, two.q_rows)
    return launches + [Launch(head_dim, TWO_PASS, length, length, 2 * rounds, 0, 0) for rounds in ROUNDS]


def fits(known: Mapping[Launch, float], session: Session) -> tuple[dict[int, Fitted], dict[int, str]]:
    """By head dim: the constants and the percent of two passes (None if not measured), or why there are none."""
    fitted: dict[int, Fitted] = {}
    refused: dict[int, str] = {}
    for head_dim in HEAD_DIMS:
        tile = one_pass_tile(session.arch, "bf16", head_dim)
        own = {launch: ns for launch, ns in known.items() if launch.head_dim == head_dim}
        if not own:
            continue
        try:
            constants = fit([timing(launch, tile, ns) for launch, ns in own.items() if launch.family != TWO_PASS])
            two = sorted(((launch, ns) for launch, ns in own.items() if launch.family == TWO_PASS), key=lambda pair: pair[0].heads)
            percent = None
            if len(two) == len(ROUNDS):
                few, many = (two_pass_timing(launch, tile, session.sms, ns) for launch, ns in two)
                percent = percent_of(few, many, step_ns=_with_ends_ns(constants, tile))
            fitted[head_dim] = constants, percent
        except ValueError as error:
            refused[head_dim] = str(error)
    return fitted, refused


def timing(launch: Launch, tile: Tile, ns: float) -> Timing:
    """In tiles of one pass."""
    n_q, n_kv = launch.q_len // tile.block_m, launch.kv_len // tile.block_n
    return Timing(launch.family, n_q, n_kv, launch.heads, launch.roles, launch.heads_in_flight, ns)


def two_pass_timing(launch: Launch, tile: Tile, sms: int, ns: float) -> TwoPassTiming:
    """In tiles of one pass that an SM has to do."""
    tiles = launch.heads * (launch.q_len / tile.block_m) * (launch.kv_len / tile.block_n)
    return TwoPassTiming(tiles / (sms // 2 * 2), ns)


def compile_first(launches: Sequence[Launch], jobs: int, seconds: float) -> None:
    """Fills the compilers' caches from several processes, for so long at most; what fails there fails again when it is measured."""
    parts = [[asdict(launch) for launch in launches[n::jobs]] for n in range(min(jobs, len(launches)))]
    run_together([child("compile launches", launches=part) for part in parts], seconds)


def compile_launches(launches: Sequence[Mapping[str, Any]]) -> int:
    """Compiles what is measured, as far as that can be, in this process."""
    for launch in launches:
        with suppress(Exception), _backward_of(Launch(**launch)):
            pass
    return 0


@contextmanager
def _backward_of(launch: Launch) -> Iterator[Callable[[], None]]:
    """A call that runs the backward of one attention, compiled under the settings of its launch; it has run once."""
    forced: dict[str, Any] = {"template": TWO_PASS} if launch.family == TWO_PASS else {"schedule": launch.family, "kernel": TRITON}
    query, key, value = (
        torch.randn(1, launch.heads, length, launch.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for length in (launch.q_len, launch.kv_len, launch.kv_len)
    )
    with (
        enabled(guarantee="run", on_unsupported="error", costs="", **forced),
        deterministic(),
        functorch_config.patch(donated_buffer=False),  # the graph is kept between backwards
    ):
        out = torch.compile(torch.nn.functional.scaled_dot_product_attention, dynamic=False)(query, key, value)
        grad = torch.randn_like(out)

        def backward() -> None:
            torch.autograd.backward(out, grad, retain_graph=True)

        backward()
        yield backward


def measure(launch: Launch) -> float:
    """Median time in ns of the longest kernel in the backward of one compiled attention."""
    with _backward_of(launch) as backward, profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(LAUNCHES):
            backward()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiled.events():
        times.setdefault(event.name, []).append(1000 * event.device_time)  # us to ns
    ours = [launches for name, launches in times.items() if name.startswith("triton_tem_")]
    if not ours or any(len(launches) != LAUNCHES for launches in ours):
        raise ValueError(f"the profiler saw {[len(t) for t in ours]} launches of our kernels, not {LAUNCHES} of each")
    return statistics.median(max(ours, key=sum))


def cost_file(session: Session, fitted: Mapping[int, Fitted]) -> str:
    """The TOML of this GPU, for the setting `costs`: what was fitted, and what the package's file says of the rest.

    Neither the Gluon kernel, masks, the smaller tile, head dims up to 32 nor two passes past head dim 128 are timed for it. The
    last two follow the fitted numbers of head dims 64 and 128, as estimates, and the others stay.
    """
    source = f"fitted by `python -m dash_inductor qualify` on one {session.gpu}, {session.sms} SMs, bf16"
    measured: dict[str, tuple[int, str]] = {
        "sms": (session.sms, f"multi_processor_count of one {session.gpu}, as torch reports it"),
        "l2_bytes": (session.l2_bytes, f"L2_cache_size of one {session.gpu}, as torch reports it"),
    }
    for d, (constants, percent) in fitted.items():
        tile = one_pass_tile(session.arch, "bf16", d)
        flop = tile.block_m * tile.block_n * tile.block_d * FLOP_PER_ELEMENT
        tflops = round(flop * session.sms * tile.ctas_per_sm / _with_ends_ns(constants, tile) / 1000)
        measured[f"tflops.{d}"] = tflops, f"{source}: {constants.step_ns:.0f} ns a step, fit {constants.error:.1%} off"
        measured[f"chain_ns.{d}"] = max(0, round(constants.chain_ns)), source
        if percent is not None:
            measured[f"two_pass_percent.{d}"] = percent, source
    for name in ("hop_ns", "shift_percent", "launch_ns"):
        values = {d: getattr(constants, name) for d, (constants, _) in fitted.items()}
        each = ", ".join(f"{value:.0f} at d = {d}" for d, value in values.items())
        measured[name] = max(0, round(statistics.fmean(values.values()))), f"{source}: {each}"
    now = flat(numbers_of(session.key))
    followed: dict[str, tuple[int, str]] = {}
    if session.sms != now["sms"]["value"]:
        for name in now:
            if name.startswith(f"{OF_GLUON}tflops"):
                value = round(now[name]["value"] * session.sms / now["sms"]["value"])
                followed[name] = value, f"not timed: {now[name]['value']} of the package's file, for {session.sms} SMs"
    for name, like in (("two_pass_percent.256", "two_pass_percent.128"), ("tflops.32", "tflops.64")):
        if name in now and like in measured:
            value = round(now[name]["value"] * measured[like][0] / now[like]["value"])
            followed[name] = value, f"not timed: {like} as fitted, by their ratio in the package's file"

    def entry(name: str) -> str:
        own = now[name]
        value, said = (measured | followed).get(name, (own["value"], own["source"]))
        estimate = name not in measured and own["estimate"]
        return f'{name} = {{ value = {value}, estimate = {str(estimate).lower()}, source = "{said}" }}'

    head = f'# Cost constants of the model for the {session.gpu}. The unit of each is in its name.\ngpu = "{session.gpu}"'
    return "\n".join([f'{head}\narch = "sm_{session.arch}"', *map(entry, now), ""])


def _with_ends_ns(constants: Constants, tile: Tile) -> float:
    """ns of a step with its part in the ends of chains, as a cost file has it."""
    return constants.step_ns + max(0, constants.chain_ns) / mean_steps("full", tile.block_m, tile.block_n)


def flat(numbers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of a cost file, with (value, source, estimate) of each; what it says of the GPU is left out."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in numbers.items():
        if isinstance(entry, dict):
            found |= {name: entry} if "value" in entry else {f"{name}.{d}": each for d, each in entry.items()}
    return found
