"""How two tensors differ: every bit counts, and distances are counted in floating-point numbers."""

from __future__ import annotations

import bisect
import functools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dash_inductor.reproduce.compare import difference, ulps
from dash_inductor.reproduce.fingerprint import fingerprint

SMALL = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
PATTERNS = st.integers(-(1 << 15), (1 << 15) - 1)
NAN = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)


@functools.cache
def numbers(dtype: torch.dtype) -> list[float]:
    """Every number of the dtype, both infinities included, upwards."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).double()
    return sorted(set(values[~values.isnan()].tolist()))


@pytest.mark.parametrize("dtype", SMALL)
@settings(max_examples=500, deadline=None)
@given(st.tuples(PATTERNS, PATTERNS))
@example((0, -(1 << 15)))  # +0 and -0
@example((1, -(1 << 15) + 1))  # the least numbers beside zero
@example((0x7F7F, 0x7F80))
@example((0x7BFF, 0x7C00))  # the largest fp16 and infinity
def test_ulps_count_the_numbers_in_between(dtype, patterns):
    """By definition: both are looked up among all numbers of their dtype."""
    a, b = torch.tensor(patterns, dtype=torch.int16).view(dtype)
    found = ulps(a, b)
    if a.isnan() or b.isnan():
        assert found is None
    else:
        assert found == abs(bisect.bisect_left(numbers(dtype), a.item()) - bisect.bisect_left(numbers(dtype), b.item()))


@pytest.mark.parametrize("dtype", WIDE)
@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, width=32), st.integers(1, 4), st.booleans())
def test_ulps_of_neighbours(dtype, value, steps, up):
    a = torch.tensor(value, dtype=dtype)
    b, taken = a, 0
    for _ in range(steps):
        following = b.nextafter(torch.tensor(math.inf if up else -math.inf, dtype=dtype))
        taken += int(following != b)
        b = following
    assert ulps(a, b) == ulps(b, a) == taken


def test_ulps_far_apart():
    """Also where 64 bits do not hold the distance."""
    largest = torch.tensor(math.inf, dtype=torch.float64)
    assert ulps(-largest, largest) == 2 * 0x7FF0000000000000
    assert ulps(torch.tensor(1), torch.tensor(2)) is None


@pytest.mark.parametrize(
    ("first", "second", "index", "distance", "what"),
    [
        (
            torch.tensor([0.0, 1.0]),
            torch.tensor([-0.0, 1.0]),
            (0,),
            0,
            "1 of 2 elements differ; the first is 0 in the first run and -0",
        ),
        (torch.ones(2, 3), torch.tensor([[1.0, 1, 1], [1, 1, 2]]), (1, 2), 1 << 23, "1 of 6"),
        (torch.tensor([math.inf]), torch.tensor([math.nan]), (0,), None, "the first is inf in the first run and nan (0x7fc00000)"),
        (NAN[:1], NAN[1:], (0,), None, "nan (0x7fc0) in the first run and nan (0x7fc1)"),
        (torch.tensor(1), torch.tensor(5), (), None, "the first is 1 in the first run and 5"),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1,), None, "False in the first run and True"),
        (torch.tensor([1j, 2j]), torch.tensor([1j, 3j]), (1,), None, "1 of 2"),
        (torch.ones(2), torch.ones(3), None, None, "its shape is [2] in the first run and [3] in this one"),
        (torch.ones(2), torch.ones(2).half(), None, None, "its dtype is torch.float32 in the first run and torch.float16 in this"),
        (torch.ones(2), None, None, None, "there is no gradient in this run"),
        (None, torch.ones(2), None, None, "there is no gradient in the first run"),
    ],
)
def test_the_first_element_that_differs(first, second, index, distance, what):
    found = difference(first, second)
    assert (found.index, found.ulps) == (index, distance)
    assert what in found.what


@pytest.mark.parametrize(
    "tensor",
    [
        None,
        torch.tensor([math.nan, -0.0]),
        torch.ones(2, 3).mT,
        torch.zeros(0, 3),
        torch.ones(2).expand(3, 2),
        torch.ones(2).cfloat().conj(),
    ],
)
def test_the_same_bits(tensor):
    assert difference(tensor, tensor if tensor is None else tensor.clone()) is None


DIAGONAL = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc])
def test_a_sparse_tensor_is_its_places_too(to_sparse):
    """The same values elsewhere are another tensor."""
    same, other = to_sparse(DIAGONAL.clone()), to_sparse(DIAGONAL.flip(0))
    assert fingerprint(to_sparse(DIAGONAL)) == fingerprint(same) != fingerprint(other)
