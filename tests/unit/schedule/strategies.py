"""Random geometries, schedules and plans for the tests here."""

from __future__ import annotations

from hypothesis import strategies as st

from dash_inductor.schedule import MASKS, Geometry, Plan, Schedule, make
from dash_inductor.schedule.families import FAMILIES


@st.composite
def geometries(draw: st.DrawFn, mask: str | None = None) -> Geometry:
    """Up to 9 x 12 tiles, blocks that divide each other or not, any lengths."""
    block_m, block_n = draw(st.sampled_from([(1, 1), (1, 2), (2, 4), (1, 3), (3, 2), (2, 1), (2, 5)]))
    q_len, kv_len = draw(st.integers(1, 12 * block_m)), draw(st.integers(1, 9 * block_n))
    return Geometry(q_len, kv_len, block_m, block_n, mask or draw(st.sampled_from(MASKS)))


@st.composite
def triangles(draw: st.DrawFn) -> Geometry:
    """Causal geometries in which lo(j) = k * j and every chain has a step."""
    k, n = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    q_len = k * (n - 1) + draw(st.integers(1, 6))
    return Geometry(q_len, n * k, 1, k, "causal_top_left")


@st.composite
def schedules(draw: st.DrawFn, family: str | None = None) -> Schedule:
    """Any family with any number of roles and any stride that it takes."""
    family = family or draw(st.sampled_from(FAMILIES))
    mask = "full" if family == "shift" else None
    geometry = draw(triangles() if mask is None and draw(st.booleans()) else geometries(mask))
    if family == "symmetric" and geometry.mask == "full":
        geometry = Geometry(geometry.q_len, geometry.kv_len, geometry.block_m, geometry.block_n, draw(st.sampled_from(MASKS[1:])))
    most = -(-geometry.n_kv // 2) if family == "symmetric" else geometry.n_kv
    if family == "shift":
        most = min(most, geometry.n_q)
    roles = draw(st.integers(1, most))
    stride = draw(st.none() | st.integers(1, geometry.n_q // roles)) if family == "shift" else None
    return make(family, geometry, roles, stride=stride, boustrophedon=family == "descending" and draw(st.booleans()))


@st.composite
def plans(draw: st.DrawFn, family: str | None = None) -> Plan:
    """Any schedule for up to 5 heads."""
    heads = draw(st.integers(1, 5))
    return Plan(draw(schedules(family)), heads, draw(st.integers(1, heads)), draw(st.integers(1, 3)))
