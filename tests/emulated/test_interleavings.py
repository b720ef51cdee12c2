"""The same bits in thousands of random interleavings, all different: `make nightly` counts them, and prints how many there were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from attention import backward, compiled, differing
from flex import Attention, backward_of, documents, everything, window
from tensors import CAUSAL, FULL, arguments
from test_varlen import Packed
from torch import Tensor

from dash_inductor import decisions, enabled
from dash_inductor.emulation import Launch, emulate, interpreter

pytestmark = pytest.mark.usefixtures("rewriting")

NIGHTLY = 560
QUICK = 50  # of each of the SLICE

Gradients = Callable[[int, int | None], Sequence[Tensor]]


@dataclass(frozen=True)
class OfTheOp:
    """The compiled op, `sizes` being batch, heads, kv heads, S_q and S_k, under settings."""

    mask: str
    sizes: tuple[int, int, int, int, int]
    sms: int
    settings: dict[str, str]

    @contextmanager
    def gradients(self) -> Iterator[Gradients]:
        batch, heads, kv_heads, q_len, kv_len = self.sizes
        args = arguments(batch, heads, q_len, kv_len, kv_heads=kv_heads)
        with enabled(**self.settings):
            function = compiled(backward(self.mask))

            def run(seed: int, resident: int | None) -> Sequence[Tensor]:
                with emulate(seed, sms=self.sms, resident=resident):
                    return function(*args)

            yield run


@dataclass(frozen=True)
class OfAttention:
    """An attention whose mask has a matrix of blocks."""

    attention: Attention | Packed

    @contextmanager
    def gradients(self) -> Iterator[Gradients]:
        yield backward_of(self.attention.function(), self.attention.tensors())


def op(family: str, mask: str, sizes: tuple[int, int, int, int, int], sms: int, **settings: str) -> OfTheOp:
    return OfTheOp(mask, sizes, sms, {"schedule": family, **settings})


ALL = (None,)
ANY = (None, 3, None, 2, None, 1)
# What runs, and how many of its programs are resident, in turn.
CASES: dict[str, tuple[OfTheOp | OfAttention, Sequence[int | None]]] = {
    "ascending": (op("ascending", FULL, (1, 1, 1, 48, 96), 3), ALL),
    "ascending, causal": (op("ascending", CAUSAL, (1, 2, 2, 48, 48), 4), ALL),
    "descending": (op("descending", FULL, (1, 2, 1, 33, 64), 2), ALL),
    "descending, causal, more passes": (op("descending", CAUSAL, (1, 1, 1, 96, 96), 2), ALL),
    "shift": (op("shift", FULL, (1, 1, 1, 48, 96), 3), ALL),
    "shift, more passes": (op("shift", FULL, (1, 1, 1, 33, 130), 3), ALL),
    "symmetric": (op("symmetric", CAUSAL, (1, 1, 1, 96, 96), 2), ALL),
    "shift round robin": (op("shift_round_robin", FULL, (1, 2, 2, 32, 64), 3), ALL),
    "symmetric round robin": (op("symmetric_round_robin", CAUSAL, (1, 2, 2, 66, 66), 3), ALL),
    "chained ascending": (op("ascending", FULL, (1, 2, 2, 32, 64), 6, launch="chained"), ANY),
    "chained descending, causal": (op("descending", CAUSAL, (1, 2, 2, 48, 48), 6, launch="chained"), ANY),
    "two passes": (op("auto", FULL, (1, 2, 2, 48, 64), 6, template="two_pass"), ANY),
    "two passes, causal": (op("auto", CAUSAL, (1, 2, 2, 48, 48), 6, template="two_pass"), ANY),
    "block mask": (OfAttention(Attention(window, q_len=48)), ANY),
    "block mask of documents": (OfAttention(Attention(documents(20, 28), q_len=48)), ANY),
    "block mask, GQA": (OfAttention(Attention(everything, q_len=32, kv_len=96, kv_heads=1)), ANY),
    "varlen": (OfAttention(Packed((9, 50))), ANY),
    "varlen, full": (OfAttention(Packed((24, 24), window=(-1, -1))), ANY),
}
SLICE = ("chained ascending", "block mask of documents")


@contextmanager
def launched() -> Iterator[list[Launch]]:
    """All launches inside, of kernels without atomics too."""
    launches: list[Launch] = []
    stock = interpreter.interleave

    def interleave(*args: Any) -> Launch:
        launches.append(stock(*args))
        return launches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "interleave", interleave)
        yield launches


def interleaving(launches: Sequence[Launch]) -> tuple[tuple[int, ...], ...]:
    """The turns of the kernel that sums dq across CTAs; of two passes, which have none, those of all kernels."""
    sums = [launch.schedule for launch in launches if launch.waits + launch.satisfied]
    return tuple(sums or [launch.schedule for launch in launches])


def distinct(name: str, wanted: int) -> int:
    """Runs a case until `wanted` interleavings were different, and asserts that all gave the same bits; how often it ran."""
    case, residents = CASES[name]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    waited = 0
    with case.gradients() as gradients, emulate(), launched() as launches:
        first = gradients(0, None)
        assert all(grad.isfinite().all() for grad in first)
        for seed in range(2 * wanted):
            launches.clear()
            result = gradients(seed, residents[seed % len(residents)])
            assert differing(result, first) == [], (name, seed)
            seen.add(interleaving(launches))
            waited += any(launch.waits for launch in launches)
            if len(seen) == wanted:
                break
    assert len(seen) == wanted
    # CTAs did wait for each other; those of two passes never do.
    assert (waited > 0) == (decisions()[-1].family != "two_pass")
    return seed + 1


@pytest.mark.parametrize("name", SLICE)
def test_a_hundred_interleavings(name):
    distinct(name, QUICK)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_interleavings(name, record_property):
    """Of all cases together; no launch ended in a deadlock, or an error would be here."""
    record_property("launches", distinct(name, NIGHTLY))
    record_property("different interleavings", NIGHTLY)


def test_they_are_ten_thousand():
    assert len(CASES) * NIGHTLY >= 10_000
