from __future__ import annotations

import re

import pytest
from hypothesis import given

from dash_inductor.schedule import Geometry

from .strategies import geometries


@given(geometries())
def test_tiles_are_those_with_an_allowed_element(g: Geometry) -> None:
    """A (Q tile, KV tile) is visited just if the mask lets one of its rows see one of its columns, all rows of a tile
    counted."""

    def allowed(i: int, j: int) -> bool:
        last_row, first_col = (i + 1) * g.block_m - 1, j * g.block_n
        shift = {"causal_top_left": 0, "causal_bottom_right": g.kv_len - g.q_len}.get(g.mask)
        return shift is None or first_col <= last_row + shift

    for j in range(g.n_kv):
        visited = [i for i in range(g.n_q) if allowed(i, j)]
        assert list(range(g.lo(j), g.hi(j))) == visited
        assert g.steps(j) == len(visited)
    for i in range(g.n_q):
        assert list(g.contributors(i)) == [j for j in range(g.n_kv) if allowed(i, j)]


@given(geometries())
def test_a_triangle_has_lo_k_j_and_no_empty_chain(g: Geometry) -> None:
    if g.is_triangle:
        assert all(g.lo(j) == g.ratio * j and g.steps(j) > 0 for j in range(g.n_kv))


@pytest.mark.parametrize("name", ["q_len", "kv_len", "block_m", "block_n"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_sizes_are_named(name: str, value: object) -> None:
    sizes = {"q_len": 6, "kv_len": 6, "block_m": 1, "block_n": 2, name: value}
    with pytest.raises(ValueError, match=re.escape(f"{name} must be a positive int, got {value!r}")):
        Geometry(**sizes, mask="full")


def test_an_unknown_mask_is_named_with_the_known() -> None:
    with pytest.raises(ValueError, match=r"mask must be one of full, causal_top_left, .*, got 'window'"):
        Geometry(6, 6, 1, 2, "window")
