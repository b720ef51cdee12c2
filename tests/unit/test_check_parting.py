"""The first operation that differs, of two runs that are written down."""

from __future__ import annotations

import pytest

from dash_inductor.reproduce.diverge import Operation, parting

A, B = "float32[2]:aa", "float32[2]:bb"
PYTHON = "the Python code before this line did not do the same"


def op(name="add", inputs=(A,), outputs=(A,), random=("s",), source="train.py:1", lines=(), backward=False) -> Operation:
    return Operation(name, list(inputs), list(outputs), list(random), source, list(lines), backward)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([op(), op("mul")], [op(), op("mul")], None),
        (
            [op(), op("mul"), op("sum")],
            [op(), op("mul", outputs=[B]), op("sum", inputs=[B], outputs=[B])],
            ("operation", "mul", "train.py:1", "its inputs are equal, and its output is not: it is not deterministic"),
        ),
        (
            [op("mul", source="train.py:3", lines=["a.py:2"], backward=True)],
            [op("mul", source="train.py:3", lines=["a.py:2"], backward=True, outputs=[B])],
            (
                *("operation", "mul", "train.py:3"),
                "its inputs are equal, and its output is not: it is not deterministic in the backward of this line",
            ),
        ),
        (
            [op("dropout")],
            [op("dropout", random=["t"], outputs=[B])],
            ("random", "dropout", "train.py:1", "its inputs are equal, but the random number generator is in another state"),
        ),
        ([op()], [op(random=["t"])], None),  # it does not draw
        (  # what the first run alone did, such as filling a cache, has nothing to do with it
            [op("detach"), op(source="train.py:9", inputs=[A, "0.5"], backward=True)],
            [op(source="train.py:9", inputs=[A, "0.25"], backward=True)],
            ("python", "add", "train.py:9", f"its inputs differ already (0.5 and 0.25): {PYTHON} in the backward of this line"),
        ),
        (  # but it does where its output is what differs
            [op("fill", outputs=[B]), op(source="train.py:9", inputs=[B])],
            [op(source="train.py:9", inputs=[A])],
            ("python", "fill", "train.py:1", f"only the first run does it: {PYTHON}"),
        ),
        (
            [op("fill"), op("rand", inputs=["2", "generator:aa"])],
            [op("rand", inputs=["2", "generator:bb"])],
            (
                "random",
                "rand",
                "train.py:1",
                "its inputs are equal, but the torch.Generator that it draws from is in another state",
            ),
        ),
        (
            [op(inputs=["0.5"])],
            [op(inputs=["0.25"])],
            ("python", "add", "train.py:1", f"its inputs differ already (0.5 and 0.25): {PYTHON}"),
        ),
        (
            [op(inputs=[A])],
            [op(inputs=[B])],
            (
                "python",
                "add",
                "train.py:1",
                f"its inputs differ already (a tensor that no operation of torch has made or changed): {PYTHON}",
            ),
        ),
        # An operation that one run alone does is passed over where a later one is at fault, else it is named.
        (
            [op("fill"), op("mul")],
            [op("mul", outputs=[B])],
            ("operation", "mul", "train.py:1", "its inputs are equal, and its output is not: it is not deterministic"),
        ),
        ([op("sin"), op("sum")], [op("sum", inputs=[B])], ("python", "sin", "train.py:1", f"only the first run does it: {PYTHON}")),
        ([op("sum")], [op("sum"), op("sin", source=None)], ("python", "sin", None, f"only this run does it: {PYTHON}")),
    ],
)
def test_the_first_that_differs(first, second, found):
    parted = parting(first, second)
    assert (None if parted is None else (parted.kind, parted.op, parted.source, parted.cause)) == found
