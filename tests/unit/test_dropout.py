"""Which elements a forward drops: Philox by its published answers and torch's own, places by slow copies of the kernels' loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import inductor_prims

from dash_inductor.dropout import EFFICIENT, FLASH, ROUNDS, Dropout, kept
from dash_inductor.dropout.philox import philox
from dash_inductor.op import random_state
from dash_inductor.rewrite import drops

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# Random123, tests/kat_vectors: (counter, key, rounds) -> words
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (*PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ((0,) * 4, (0,) * 2, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
SHAPE = 2, 3, 37, 70
STATES = [(0, 0), (5, 2**32 - 7), (-1, -(2**33) - 3), (2**41 + 9, 2**35 + 1)]


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, rounds, words):
    assert tuple(int(x) for x in philox(tuple(map(torch.tensor, counter)), key, rounds)) == words
    x, y, z, w = counter
    assert tuple(words_of(x | y << 32, z | w << 32, key[0] | key[1] << 32, rounds)) == words


@pytest.mark.nightly
def test_torchs_own():
    """Inductor's random numbers on the CPU: of each counter the first word, of which 31 bits make the number."""
    seed = 1234
    numbers = torch.compile(lambda x: inductor_prims.random([64], x, "rand"))(torch.tensor(seed))
    counters = torch.arange(64)
    words, *_ = philox((counters, *[torch.zeros_like(counters)] * 3), (seed, 0), 10)
    torch.testing.assert_close(numbers, (words & 0x7FFFFFFF).float() * 4.6566127342e-10, rtol=0, atol=0)


def words_of(counter: int, subsequence: int, seed: int, rounds: int) -> list[int]:
    """As philox.cuh and curand have a counter: two numbers of 64 bits. In Python's integers."""
    word = 2**32
    x, y, z, w = counter % word, counter // word % word, subsequence % word, subsequence // word % word
    key, key_high = seed % word, seed // word % word
    for _ in range(rounds):
        a, b = x * 0xD2511F53, z * 0xCD9E8D57
        x, y, z, w = b // word ^ y ^ key, b % word, a // word ^ w ^ key_high, a % word
        key, key_high = (key + 0x9E3779B9) % word, (key_high + 0xBB67AE85) % word
    return [x, y, z, w]


def by_curand(p: float, seed: int, offset: int) -> Tensor:
    """kernel_forward.h: a thread skips ahead to a row's first element, and takes four words at a time from there."""
    batch, heads, q_len, kv_len = SHAPE
    found = torch.zeros(SHAPE, dtype=torch.bool)
    for b, h, m in itertools.product(range(batch), range(heads), range(q_len)):
        skipped = offset % 2**64 + (b * heads * q_len * kv_len + h * q_len * kv_len) + m * kv_len
        stream = (word for n in itertools.count(skipped // 4) for word in words_of(n, 0, seed, 10))
        for word in itertools.islice(stream, skipped % 4):
            assert word >= 0  # skipped
        for n, word in enumerate(itertools.islice(stream, kv_len)):
            uniform = np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)
            found[b, h, m, n] = bool(uniform > np.float32(p))
    return found


def by_lanes(p: float, seed: int, offset: int) -> Tensor:
    """dropout.h: each lane of a warp has 16 bytes for the 2 x 8 elements that it holds of 16 rows and 32 columns."""
    batch, heads, q_len, kv_len = SHAPE
    most = math.floor(float(np.float32(1) - np.float32(p)) * 255.0)
    found = torch.zeros(SHAPE, dtype=torch.bool)
    blocks = itertools.product(range(batch * heads), range(0, q_len, 16), range(0, kv_len, 32), range(32))
    for head, row, column, lane in blocks:
        words = words_of(offset % 2**64 + head * 32 + lane, row // 16 | (column // 32) << 32, seed, 7)
        drawn = b"".join(word.to_bytes(4, "little") for word in words)
        # The lane's elements of four accumulators of 16 x 8, side by side; of two of them each half of the bytes.
        for j, a, upper, v in itertools.product(range(2), range(2), range(2), range(2)):
            m, n = row + lane // 4 + 8 * upper, column + 16 * j + 8 * a + lane % 4 * 2 + v
            if m < q_len and n < kv_len:
                found[head // heads, head % heads, m, n] = drawn[8 * j + 4 * a + 2 * upper + v] <= most
    return found


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("generator", "slowly"), [(EFFICIENT, by_curand), (FLASH, by_lanes)])
def test_places(generator, slowly, state):
    assert torch.equal(kept(Dropout(0.3, generator), torch.tensor(state), SHAPE), slowly(0.3, *state))


@pytest.mark.parametrize("generator", [EFFICIENT, FLASH])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_how_many(p, generator):
    """Of flash attention's bytes (most + 1) / 256 are kept."""
    part = kept(Dropout(p, generator), torch.tensor([3, 4]), (4, 4, 128, 128)).double().mean().item()
    assert abs(part - (1 - p)) < 0.005


@pytest.mark.parametrize("p", [1e-12, 1e-9, 0.1, 0.3, 0.5, 1 - 2**-20])
def test_the_least_word(p):
    def uniform(word: int) -> np.float32:
        return np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)

    least = Dropout(p, EFFICIENT).threshold
    assert uniform(least) > np.float32(p) and (least == 0 or not uniform(least - 1) > np.float32(p))


def test_scales():
    """What the kernels multiply with: 1 / (1 - p) in the dtype of the tensors, or in fp32."""
    assert Dropout(0.1, EFFICIENT).scale(torch.bfloat16) == 1.109375
    assert Dropout(0.1, FLASH).scale(torch.bfloat16) == pytest.approx(1 / 0.9, rel=1e-7)
    assert Dropout(0.6, FLASH).threshold == 101  # 1 - 0.6 is 0.39999998 in fp32


def test_random_states():
    """Of the memory-efficient op, and of flash attention."""
    like, seed = torch.empty(0), torch.tensor(-5)
    assert random_state(seed, torch.tensor(8), like).tolist() == [-5, 8]
    both = torch.tensor([-5, 8]).view(torch.uint64)
    found = random_state(both, torch.tensor(0, dtype=torch.uint64), like)
    assert found.tolist() == [-5, 8] and found.dtype == torch.int64 and found.data_ptr() != both.data_ptr()


# What is seen of a forward


def forward(
    generator: str, *, more: int = 0, scale: float = 1.0, base: float = math.e, raises: bool = False
) -> Callable[..., object]:
    """One by its definition. more: added to the offset that it tells; scale: of what it keeps; base: of its logsumexp."""
    drawn: Iterator[int] = itertools.count(4)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, is_causal: bool) -> tuple[Tensor, ...]:
        if raises:
            raise RuntimeError("no kernel\nof this size")
        scores = (query.float() @ key.float().mT) + (0 if bias is None else bias)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
        dropout, state = Dropout(p, generator), torch.tensor([7, 4 * next(drawn)])
        factors = kept(dropout, state, tuple(scores.shape)) * dropout.scale(query.dtype) * scale
        out = ((scores.softmax(-1) * factors) @ value.float()).to(query.dtype)
        seed, offset = state + torch.tensor([0, more])
        random = (seed, offset) if generator == EFFICIENT else ((state + torch.tensor([0, more])).view(torch.uint64), seed)
        return out, scores.logsumexp(-1) / math.log(base), *random

    return attend


def seen(attend: Callable[..., object], generator: str, kind: tuple[bool, bool] = (False, False), p: float = 0.3) -> str | None:
    like = torch.empty(0, dtype=torch.bfloat16)
    return drops.bits_seen(attend, Dropout(p, generator), kind, (64, 64), like)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("generator", [EFFICIENT, FLASH])
def test_forwards_that_are_right(generator, kind):
    assert seen(forward(generator), generator, kind) is None


@pytest.mark.parametrize("generator", [EFFICIENT, FLASH])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"more": 1}, "elements are dropped where ours are not, or kept, as [0, 0, 0, "),
        ({"scale": 0.9}, "what is kept is not multiplied with 1.4"),
        ({"scale": math.nan}, "elements are dropped where ours are not"),
        ({"base": 2}, "logsumexp is off by 2.2"),
        ({"raises": True}, "a forward that drops raises RuntimeError: no kernel"),
    ],
)
def test_forwards_that_are_off(changes, reason, generator):
    assert reason in (seen(forward(generator, **changes), generator) or "")


@pytest.mark.parametrize(("generator", "other"), [(EFFICIENT, FLASH), (FLASH, EFFICIENT)])
def test_another_generator_is_seen(generator, other):
    assert "elements are dropped where ours are not" in (seen(forward(other), generator) or "raises")


def test_one_element_is_seen(monkeypatch):
    """The last one of all that are asked of."""
    stock = drops.kept

    def but_one(dropout: Dropout, state: Tensor, shape: tuple[int, ...]) -> Tensor:
        found = stock(dropout, state, shape)  # type: ignore[arg-type]
        found[-1, -1, -1, -1] ^= shape == drops.SHAPES[-1]
        return found

    monkeypatch.setattr(drops, "kept", but_one)
    assert (seen(forward(EFFICIENT), EFFICIENT) or "").startswith("1 of ")


def test_rounds():
    assert ROUNDS == {EFFICIENT: 10, FLASH: 7}
