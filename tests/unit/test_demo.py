"""What the demo must notice."""

from types import SimpleNamespace

import pytest

from dash_inductor import demo


def run(**digests: str) -> dict:
    return {"digests": {"loss of step 0": "a", "gradient of head.weight in step 0": "b"} | digests}


def test_no_difference():
    assert demo.difference(run(), run()) is None


def test_the_first_difference_is_named():
    other = run(**{"gradient of head.weight in step 0": "c"})
    assert demo.difference(run(), other) == "bitwise: the gradient of head.weight in step 0 differs"


def test_a_missing_tensor_is_a_difference():
    assert demo.difference(run(), run(more="d")) == "bitwise: the runs have different tensors"


def test_waits_are_added_up():
    assert demo._waits([SimpleNamespace(waits=2), SimpleNamespace(waits=5)]) == 7


@pytest.mark.parametrize("launches", [[], [SimpleNamespace(waits=3), SimpleNamespace(waits=0)]])
def test_an_attention_without_a_wait_proves_nothing(launches):
    with pytest.raises(RuntimeError, match="no CTA had to wait"):
        demo._waits(launches)


def test_the_text_is_real_and_long():
    assert len(demo._text()) > 100_000
