"""The cost files, one TOML per device beside this module or one that the user names, and the costs that they give for a tile.

A `device` here is the name of one of those beside this module ("h100"), or the path of another file, which ends in .toml.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import GLUON, TRITON
from ..schedule.costs import FLOP_PER_ELEMENT, KV_MATMULS, MOST_SMS, Q_MATMULS, Costs, Launches, TwoPass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
SUFFIX = ".toml"
SWEEP = "sweep_percent"
SMALL_LAUNCHES = ("small_launch_ns", "memory_gbps")
LAUNCHES = ("launch_ns", *SMALL_LAUNCHES)
WHOLE = ("sms", "l2_bytes", "hop_ns", "shift_percent", SWEEP, *LAUNCHES)
# Each for head dims up to "64" and up to "128"; of larger ones two passes may have a number for those up to "256".
BY_HEAD_DIM = ("tflops", "chain_ns", "two_pass_percent")
# What the Gluon kernel has in the place of the Triton kernel's numbers, where there is one: on sm_90. Also for those up to "256".
OF_GLUON = "gluon_"
GLUON_BY_HEAD_DIM = tuple(OF_GLUON + name for name in ("tflops", "hop_ns", "shift_percent", SWEEP, "chain_ns"))
# What a file may leave out: the time of a step under a mask in percent of that without, and in the tile with fewer rows, for as
# many elements, in percent of that in the other. Each 100 where it is left out.
CAUSAL, SMALL_TILE = "causal_percent", "small_tile_percent"
OPTIONAL = (CAUSAL, OF_GLUON + CAUSAL, SMALL_TILE)
TEXTS = ("gpu", "arch")
MEMORY = "memory_gib"
LENGTH = 8192  # positions of a sequence, of which the speeds are
STANDS_IN = "stands_in"  # whether the file serves GPUs of its architecture that have none; read of files beside this module alone
OF_BOARD = (*TEXTS, MEMORY, STANDS_IN)  # what a file says of a GPU beside its costs
# From and to which value each number goes, by the end of its name; beyond these no GPU is, and sums of them fit into 64 bits.
RANGES = {
    "sms": (1, MOST_SMS),
    MEMORY: (1, 2**20),
    "l2_bytes": (1, 2**40),
    "tflops": (1, 10**6),
    "_ns": (0, 10**9),
    "_gbps": (1, 10**6),
    "shift_percent": (0, 10**4),
    SWEEP: (0, 10**4),
    "_percent": (1, 10**4),
}
# Of a file: the time that a key takes to be read grows as the square of its dots, and the stack with the depth of brackets.
MOST_BYTES, MOST_COLUMNS, MOST_BRACKETS = 1 << 16, 2000, 100

COSTS_REMEDY = "every compilation raises this: name another file, or unset DASH_INDUCTOR_COSTS"


class CostFileError(ValueError):
    """A cost file that the user names is not there, is damaged, or is of another GPU; the message has its path."""


def known_devices() -> tuple[str, ...]:
    """Devices that have a cost file."""
    return tuple(sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}")))


def numbers_of(device: str) -> Mapping[str, Any]:
    """What the cost file of a device says: `arch`, `gpu` of one that exists, and (value, source, estimate) by name.

    Raises:
        CostFileError: a file that the user names cannot be read, or is no cost file.
    """
    return _named(device)[0] if device.endswith(SUFFIX) else _shipped(FOLDER / f"{device}{SUFFIX}")


@cache
def _shipped(path: Path) -> Mapping[str, Any]:
    return MappingProxyType(tomllib.loads(path.read_text(encoding="utf-8")))


@cache
def _named(path: str) -> tuple[Mapping[str, Any], str]:
    """What a file of the user's says, and the SHA-256 of its bytes. Once in a process: both are of the same bytes."""
    try:
        data = _bytes_of(path)
        numbers = tomllib.loads(data.decode())
        if wrong := _what_is_wrong(numbers):
            raise ValueError(wrong)
    except OSError as error:
        raise CostFileError(f"cost file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CostFileError(f"cost file {path} is damaged: {error}") from None
    return MappingProxyType(numbers), hashlib.sha256(data).hexdigest()


def _bytes_of(path: str) -> bytes:
    """What a file has; ValueError if it is none, such as a pipe, which would not end, or too large for a cost file."""

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would wait for one

    with open(path, "rb", opener=at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    if max(map(len, data.split(b"\n"))) > MOST_COLUMNS:
        raise ValueError(f"a line has more than {MOST_COLUMNS} bytes")
    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise ValueError(f"it opens more than {MOST_BRACKETS} brackets")
    return data


def _what_is_wrong(numbers: Mapping[str, Any]) -> str | None:
    """The first thing for which a file is no cost file that a user may name."""
    for name in TEXTS:
        if not isinstance(numbers.get(name), str):
            return f"it does not say {name}"
    if not re.fullmatch("sm_[0-9]{2,3}", numbers["arch"]):
        return f"arch = {numbers['arch']!r:.40} is not one such as 'sm_90'"
    if type(numbers.get(STANDS_IN, True)) is not bool:
        return f"{STANDS_IN} = {numbers[STANDS_IN]!r:.40} is neither true nor false"
    by_head_dim = BY_HEAD_DIM + GLUON_BY_HEAD_DIM if numbers["arch"] == "sm_90" else BY_HEAD_DIM
    optional = tuple(name for name in OPTIONAL if name in numbers)
    wanted = {name: numbers.get(name) for name in (*WHOLE, *([MEMORY] if MEMORY in numbers else []))}
    for name in (*by_head_dim, *optional):
        entries = numbers.get(name)
        entries = entries if isinstance(entries, dict) else {}
        asked = ("64", "128", *(["256"] if name in GLUON_BY_HEAD_DIM else []))
        if unknown := sorted(set(entries) - {"32", "64", "128", "256"}):
            return f"{name}.{unknown[0]} is no cost constant"
        wanted |= {f"{name}.{up_to}": entries.get(up_to) for up_to in (*asked, *(x for x in entries if x not in asked))}
    if unknown := sorted(set(numbers) - {*OF_BOARD, *WHOLE, *by_head_dim, *optional}):
        return f"{unknown[0]} is no cost constant"
    for name, entry in wanted.items():
        if not isinstance(entry, dict) or set(entry) != {"value", "estimate", "source"}:
            return f"{name} has not a value, an estimate and a source"
        least, most = next(bounds for end, bounds in RANGES.items() if name.partition(".")[0].endswith(end))
        if type(entry["value"]) is not int or not least <= entry["value"] <= most:
            return f"{name} = {entry['value']!r:.40} is not a whole number from {least} to {most}"
        if type(entry["estimate"]) is not bool:
            return f"estimate = {entry['estimate']!r:.40} of {name} is neither true nor false"
        if not isinstance(entry["source"], str):
            return f"source = {entry['source']!r:.40} of {name} is no text"
    return None


def digest_of(path: str) -> str:
    """The SHA-256 of a cost file that the user names; "" for the path "", which names none. CostFileError as `numbers_of`."""
    return _named(path)[1] if path else ""


def require_of(path: str, gpu: str, arch: int | str) -> str:
    """The path, if the file is of the GPU that CUDA calls `gpu`, of this architecture (90 for sm_90).

    Raises:
        CostFileError: it is of another, or as `numbers_of`.
    """
    numbers = numbers_of(path)
    mine = f"sm_{arch}" if isinstance(arch, int) else arch
    if (numbers["gpu"], numbers["arch"]) != (gpu, mine):
        raise CostFileError(f"cost file {path} is of {numbers['gpu']} ({numbers['arch']}), and this device is {gpu} ({mine})")
    return path


def has_estimates(device: str, kernel: str = TRITON) -> bool:
    """Whether a number of its cost file has not been measured; those of the Gluon kernel count where it is taken. Those of two
    passes past head dim 128, of sweeps, and of kernels beside the main one do not count: `qualify` times none.

    >>> has_estimates("h100")
    True
    """
    left_out = (*OF_BOARD, *OPTIONAL, *SMALL_LAUNCHES, SWEEP, OF_GLUON + SWEEP, *(() if kernel == GLUON else GLUON_BY_HEAD_DIM))
    numbers = {name: entry for name, entry in numbers_of(device).items() if name not in left_out}
    for name, head_dim in (("two_pass_percent", "256"), ("tflops", "32")):
        numbers[name] = {d: entry for d, entry in numbers.get(name, {}).items() if d != head_dim}
    return any(own["estimate"] for entry in numbers.values() for own in ([entry] if "value" in entry else entry.values()))


def arch_of(device: str) -> int | str:
    """The architecture of a device: 90 for sm_90, or "emulated"."""
    arch: str = numbers_of(device)["arch"]
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else arch


def _entries(device: str, head_dim: int, kernel: str = TRITON) -> dict[str, dict[str, Any]]:
    """(value, source, estimate) by name, for a padded head dim; those of one pass are of TRITON or GLUON."""

    def of(entry: dict[str, Any]) -> dict[str, Any]:
        if "value" in entry:
            return entry
        *smaller, largest = sorted(map(int, entry))  # the largest is for head dims above it, too
        found: dict[str, Any] = entry[str(next((up_to for up_to in smaller if head_dim <= up_to), largest))]
        return found

    entries = {name: of(entry) for name, entry in numbers_of(device).items() if name not in OF_BOARD}
    if kernel == GLUON:
        own = (*GLUON_BY_HEAD_DIM, OF_GLUON + CAUSAL)
        entries = {name: entry for name, entry in entries.items() if name not in OPTIONAL or name in own}
        entries |= {name.removeprefix(OF_GLUON): entries[name] for name in own if name in entries}
    return entries


def _percent(entries: dict[str, dict[str, Any]], mask: str, small: bool) -> int:
    """The time of a step in percent, squared, of one in the usual tile without a mask."""
    asked = ((CAUSAL, mask != "full"), (SMALL_TILE, small))
    return math.prod(entries[name]["value"] if holds and name in entries else 100 for name, holds in asked)


@cache
def two_pass_percent(device: str, head_dim: int) -> tuple[int, bool]:
    """The time of a tile in two passes, in percent of its step in one, and whether that is an estimate.

    Two passes in three kinds of CTAs, past head dim 128, take an eighth more than that.

    >>> two_pass_percent("h100", head_dim=64)
    (114, True)
    """
    entry = _entries(device, head_dim)["two_pass_percent"]
    return entry["value"], entry["estimate"]


def load_tflops(device: str, head_dim: int, kernel: str = TRITON, *, mask: str = "full", small: bool = False) -> float:
    """TFLOPS of one pass by TRITON or GLUON on a whole GPU, for a padded head dim; mask and small are those of `load_costs`.

    >>> load_tflops("h100", head_dim=128), load_tflops("h100", head_dim=128, kernel=GLUON)
    (406.0, 673.0)
    """
    entries = _entries(device, head_dim, kernel)
    return float(entries["tflops"]["value"]) * 100**2 / _percent(entries, mask, small)


def load_costs(
    device: str,
    *,
    block_m: int,
    block_n: int,
    head_dim: int,
    sms: int | None = None,
    ctas_per_sm: int = 1,
    kernel: str = TRITON,
    mask: str = "full",
    small: bool = False,
) -> Costs:
    """Costs of a device by name, for one tile size, padded head dim and kernel of one pass: TRITON, or GLUON, which sm_90 has.

    A file's speed is that of sequences of LENGTH, the ends of their chains with it; a step is what they leave.

    mask: full, or another one. small: whether the tile is the smaller one of its head dim (`templates/tiles.py`).
    sms overrides the number of the file: a real GPU tells its own (PCIe card, MIG slice). An unknown device raises
    ValueError.

    >>> load_costs("h100", block_m=64, block_n=128, head_dim=128).step_ns
    3334
    >>> load_costs("h100", block_m=64, block_n=128, head_dim=128, kernel=GLUON, mask="causal").step_ns
    2314
    >>> load_costs("emulated", block_m=16, block_n=32, head_dim=64).workers
    6
    """
    if not device.endswith(SUFFIX) and device not in known_devices():
        raise ValueError(f"no cost file for device {device!r}; known: {', '.join(known_devices())}")
    entries = _entries(device, head_dim, kernel)
    if "tflops" in entries:
        flop = block_m * block_n * head_dim * FLOP_PER_ELEMENT * _percent(entries, mask, small) // 100**2
        entries["step_ns"] = _step(entries, flop, ctas_per_sm)
        ends_ns = round(entries["chain_ns"]["value"] / mean_steps(mask, block_m, block_n))
        entries["step_ns"] = entries["step_ns"] | {"value": max(1, entries["step_ns"]["value"] - ends_ns)}
    own = ("step_ns", "hop_ns", "shift_percent", "l2_bytes", "chain_ns")
    return Costs(
        device=device,
        arch=numbers_of(device)["arch"],
        workers=(sms or entries["sms"]["value"]) * ctas_per_sm,
        estimate=any(entries[name]["estimate"] for name in (*own, *LAUNCHES, "sms")),
        launches=_launches(entries),
        **{name: entries[name]["value"] for name in (*own, SWEEP)},
    )


def mean_steps(mask: str, block_m: int, block_n: int) -> float:
    """Steps of a query head in a chain of sequences of LENGTH, on average: under a mask as under a causal one.

    >>> mean_steps("full", 64, 128), mean_steps("causal", 64, 128)
    (128.0, 65.0)
    """
    return LENGTH / block_m if mask == "full" else (LENGTH + block_n) / (2 * block_m)


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
    mask: str = "full",
) -> TwoPass:
    """What two passes cost on a device, as `load_costs`; block_m, block_n, kv_rows, q_rows and split are those of `TwoPass`. A mask
    is taken to cost them as much as one pass.

    >>> two = load_two_pass("h100", block_m=64, block_n=64, kv_rows=128, q_rows=128, head_dim=64)
    >>> two.kv_step_ns, two.q_step_ns
    (1159, 869)
    """
    entries = _entries(device, head_dim)
    percent, estimate = two_pass_percent(device, head_dim)
    of_mask = _percent(entries, mask, small=False)

    def step(rows: int, columns: int, matmuls: int) -> int:
        def share(whole: int) -> int:
            return whole * percent * of_mask * matmuls // (100**3 * (KV_MATMULS + Q_MATMULS))

        if "tflops" not in entries:  # a step costs the same whatever its tile
            return max(1, share(entries["step_ns"]["value"]))
        return _step(entries, share(rows * columns * head_dim * FLOP_PER_ELEMENT), ctas_per_sm=1)["value"]

    return TwoPass(
        block_m=block_m,
        block_n=block_n,
        kv_rows=kv_rows,
        q_rows=q_rows,
        kv_step_ns=step(kv_rows, block_m, KV_MATMULS + split) // (1 + split),
        q_step_ns=step(q_rows, block_n, Q_MATMULS),
        workers=sms or entries["sms"]["value"],
        split=split,
        end_ns=entries["chain_ns"]["value"],
        launches=_launches(entries),
        estimate=estimate or entries["tflops" if "tflops" in entries else "step_ns"]["estimate"],
    )


def _launches(entries: dict[str, dict[str, Any]]) -> Launches:
    return Launches(*(entries[name]["value"] for name in LAUNCHES))


def _step(entries: dict[str, dict[str, Any]], flop: int, ctas_per_sm: int) -> dict[str, Any]:
    """step_ns from the device's TFLOPS, of which an SM has its share and a CTA its share of that."""
    per_ns = entries["tflops"]["value"] * 1000  # FLOP per ns of the whole device
    step_ns = (flop * entries["sms"]["value"] * ctas_per_sm + per_ns // 2) // per_ns
    return entries["tflops"] | {"value": max(1, step_ns)}
