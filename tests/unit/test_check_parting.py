"""The first operation that differs, of two runs that are written down."""

from __future__ import annotations

import pytest

from dash_inductor.reproduce.diverge import Operation, parting

A, B = "float32[2]:aa", "float32[2]:bb"
PYTHON = "the Python code before this line did not do the same"


def op(name="add", inputs=(A,), outputs=(A,), random=("s",), source="train.py:1", lines=(), backward=False) -> Operation:
    return Operation(name, list(inputs), list(outputs), list(random), source, list(lines), backward)


NOT_DETERMINISTIC = "its inputs are equal, and its output is not: it is not deterministic"
OF_BACKWARD = {"source": "train.py:3", "lines": ["a.py:2"], "backward": True}


@pytest.mark.parametrize(
    ("first", "second", "kind", "named", "source", "cause"),
    [
        (
            *([op(), op("mul"), op("sum")], [op(), op("mul", outputs=[B]), op("sum", inputs=[B], outputs=[B])]),
            *("operation", "mul", "train.py:1", NOT_DETERMINISTIC),
        ),
        (
            *([op("mul", **OF_BACKWARD)], [op("mul", **OF_BACKWARD, outputs=[B])]),
            *("operation", "mul", "train.py:3", f"{NOT_DETERMINISTIC} in the backward of this line"),
        ),
        (
            *([op("dropout")], [op("dropout", random=["t"], outputs=[B])]),
            *("random", "dropout", "train.py:1", "its inputs are equal, but the random number generator is in another state"),
        ),
        (  # what the first run alone did, such as filling a cache, has nothing to do with it
            [op("detach"), op(source="train.py:9", inputs=[A, "0.5"], backward=True)],
            [op(source="train.py:9", inputs=[A, "0.25"], backward=True)],
            *("python", "add", "train.py:9", f"its inputs differ already (0.5 and 0.25): {PYTHON} in the backward of this line"),
        ),
        (  # but it does where its output is what differs
            *([op("fill", outputs=[B]), op(source="train.py:9", inputs=[B])], [op(source="train.py:9", inputs=[A])]),
            *("python", "fill", "train.py:1", f"only the first run does it: {PYTHON}"),
        ),
        (
            *([op("fill"), op("rand", inputs=["2", "generator:aa"])], [op("rand", inputs=["2", "generator:bb"])]),
            *("random", "rand", "train.py:1"),
            "its inputs are equal, but the torch.Generator that it draws from is in another state",
        ),
        (
            *([op(inputs=[A])], [op(inputs=[B])], "python", "add", "train.py:1"),
            f"its inputs differ already (a tensor that no operation of torch has made or changed): {PYTHON}",
        ),
        (  # such as of torch.cat
            *([op(inputs=["2"])], [op(inputs=["2", "3"])], "python", "add", "train.py:1"),
            f"its inputs differ already (nothing and 3): {PYTHON}",
        ),
        # An operation that one run alone does is passed over where a later one is at fault, else it is named.
        ([op("fill"), op("mul")], [op("mul", outputs=[B])], "operation", "mul", "train.py:1", NOT_DETERMINISTIC),
        ([op("sin"), op("sum")], [op("sum", inputs=[B])], "python", "sin", "train.py:1", f"only the first run does it: {PYTHON}"),
        ([op("sum")], [op("sum"), op("sin", source=None)], "python", "sin", None, f"only this run does it: {PYTHON}"),
    ],
)
def test_the_first_that_differs(first, second, kind, named, source, cause):
    parted = parting(first, second)
    assert (parted.kind, parted.operation.name, parted.operation.source, parted.cause) == (kind, named, source, cause)


@pytest.mark.parametrize("second", [[op(), op("mul")], [op(), op("mul", random=["t"])]])
def test_what_does_not_differ(second):
    """One that does not draw does not depend on what random numbers come next."""
    assert parting([op(), op("mul")], second) is None
