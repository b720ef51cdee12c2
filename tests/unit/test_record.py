"""The record of decisions: as text in generated code, in the order of graphs, for threads, without end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import dash_inductor
from dash_inductor.decision import Decision, add_eager, comment, decisions_in, record, take
from dash_inductor.schedule.candidates import Candidate

STAYS = Decision("an op", "cpu", "fp32", "full", 1, 2, 2, 6, "s0", 8, 'a "reason" \\ é')
TAKEN = replace(STAYS, reason=None, family="descending", candidates=(Candidate("descending", 2, 1, 3000, is_default=True),))


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    dash_inductor.clear_decisions()
    yield
    dash_inductor.clear_decisions()


def taken(*found: Decision, name: str = "GPT") -> None:
    take(found, compile_id="0/0", compiled=name, is_backward=True)


@pytest.mark.parametrize("start", ["#", "//"])
def test_decisions_survive_generated_code(start):
    """In Python and in C++, in their order; what is like them is none."""
    lines = [comment(index, decision) for index, decision in enumerate((STAYS, TAKEN, STAYS))]
    assert all(line.isascii() and line.isprintable() for line in lines)
    code = "\n".join(["import torch", *(start + line.removeprefix("#") for line in lines), f"x = {lines[0]!r}", ""])
    assert decisions_in(code) == [STAYS, TAKEN, STAYS]
    assert hash(decisions_in(code)[1]) == hash(TAKEN)


def test_the_graph_is_not_in_the_text():
    """Caches and generated code would have it: of another compilation."""
    taken(STAYS)
    (entry,) = dash_inductor.decisions()
    assert entry.graph is not None and entry.text() == STAYS.text()


def test_equal_decisions_of_two_graphs():
    """Even where torch gives a compilation the name of one before it, as after torch._dynamo.reset()."""
    taken(STAYS, STAYS)
    taken(STAYS, STAYS)
    graphs = [entry.graph for entry in dash_inductor.decisions()]
    assert graphs[0] == graphs[1] != graphs[2] == graphs[3]
    assert {str(graph) for graph in graphs} == {"graph 0/0 of GPT (backward)"}


def test_cleared():
    taken(STAYS)
    add_eager(STAYS)
    dash_inductor.clear_decisions()
    assert dash_inductor.decisions() == []
    add_eager(STAYS)
    add_eager(STAYS)
    assert dash_inductor.decisions() == [STAYS]


def test_the_newest_stay():
    for index in range(record.MOST + 2):
        taken(STAYS, name=str(index))
    entries = dash_inductor.decisions()
    assert len(entries) == record.MOST
    assert [entry.graph and entry.graph.compiled for entry in (entries[0], entries[-1])] == ["2", str(record.MOST + 1)]


def test_threads():
    """Those of one graph stay together."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: taken(STAYS, TAKEN, name=str(index)), range(400)))
    entries = dash_inductor.decisions()
    pairs = list(zip(entries[::2], entries[1::2], strict=True))
    assert all(first.graph == second.graph for first, second in pairs)
    assert len({first.graph.number for first, _ in pairs if first.graph}) == len(pairs) == 400


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_lines(caplog, level):
    """One for a graph; one for each attention of it where they are asked for."""
    caplog.set_level(level, "dash_inductor")
    taken(STAYS, TAKEN)
    add_eager(STAYS)
    details = level == logging.DEBUG
    assert caplog.messages == [
        "graph 0/0 of GPT (backward): 1 attention rewritten, 1 declined",
        *((str(STAYS), str(TAKEN)) if details else ()),
        "eager call: 0 attentions rewritten, 1 declined",
        *((str(STAYS),) if details else ()),
    ]
