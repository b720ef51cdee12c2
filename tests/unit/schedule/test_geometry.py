from __future__ import annotations

from hypothesis import given

from dash_inductor.schedule import Geometry

from .strategies import block_masks, geometries


@given(geometries())
def test_tiles_are_those_with_an_allowed_element(g: Geometry) -> None:
    """A (Q tile, KV tile) is visited just if the mask lets one of its rows see one of its columns, all rows and columns of
    a tile counted."""

    def allowed(i: int, j: int) -> bool:
        rows = range(i * g.block_m, (i + 1) * g.block_m)
        columns = range(j * g.block_n, (j + 1) * g.block_n)
        width = float("inf") if g.window is None else g.window
        return g.mask == "full" or any(row - width <= column <= row for row in rows for column in columns)

    for j in range(g.n_kv):
        visited = [i for i in range(g.n_q) if allowed(i, j)]
        assert list(g.tiles(j)) == visited
        assert g.steps(j) == len(visited)
        if visited:
            assert (g.first_q_tile(j), g.end_q_tile(j)) == (visited[0], visited[-1] + 1)
    for i in range(g.n_q):
        assert list(g.contributors(i)) == [j for j in range(g.n_kv) if allowed(i, j)]


@given(block_masks())
def test_a_block_mask_is_what_it_says(g: Geometry) -> None:
    assert g.blocks is not None
    for j, row in enumerate(g.blocks):
        assert [i in g.tiles(j) for i in range(g.n_q)] == list(row)
        assert g.steps(j) == sum(row)
        assert g.first_q_tile(j) == min(g.tiles(j), default=0)
    for i in range(g.n_q):
        assert list(g.contributors(i)) == [j for j in range(g.n_kv) if g.blocks[j][i]]
    assert not g.is_triangle and not g.is_causal


@given(geometries())
def test_a_triangle_has_lo_k_j_and_no_empty_chain(g: Geometry) -> None:
    if g.is_triangle:
        assert all(g.first_q_tile(j) == g.ratio * j and g.steps(j) > 0 and g.end_q_tile(j) == g.n_q for j in range(g.n_kv))


def test_equal_block_masks_are_equal_geometries() -> None:
    one, other = Geometry.of_blocks([[1, 0], [True, True]]), Geometry.of_blocks(((True, False), (1, 1)))
    assert one == other and hash(one) == hash(other)
    assert one.blocks == ((True, False), (True, True))
