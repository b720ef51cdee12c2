"""What follows an attention's gradients, and may be fused with a kernel, reads them only when they are complete."""

import pytest
import torch
from attention import OP, backward, compiled, differing_when_compiled
from tensors import CAUSAL, FULL, exact

from dash_inductor import emulation, enabled
from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")


WEIGHT = torch.arange(2 * 96 * 16).view(1, 2, 96, 16) % 7


# What becomes of dq, dk and dv, and whether one pass is fused with it.
EPILOGUES = {
    "the gradient of one projection that made all three": (
        lambda *grads: torch.cat([x.transpose(1, 2).flatten(2) for x in grads], -1),
        False,
    ),
    "the sum of all": (lambda dq, dk, dv: dq + dk + dv, False),
    # Reads what the kernel writes beside its output, at the place of the output.
    "scaled by the other": (lambda dq, dk, dv: (dk * dv, dk.relu() + dq), False),
    # Row 0 of every head comes from other programs than those that read it.
    "at another place": (lambda dq, dk, dv: (dk + dk[:, :, :1], dv - dv[:, :, -1:], dk + dv.flip(2), dk * dq.flip(2)), False),
    "keys and values were expanded over heads": (lambda dq, dk, dv: (dk.sum(1), dv.sum(1), dq.sum(1)), False),
    "added to what was there": (lambda dq, dk, dv: (dk.mul_(0.5).add_(dv), dv.add_(1.0)), False),
    "cast": (lambda dq, dk, dv: (dq.bfloat16(), dk.bfloat16(), dv.half()), True),
    "scaled by an input": (lambda dq, dk, dv: (dk * WEIGHT, dv, dq), True),  # the kernel reads one tensor more
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_one_pass(name):
    """Fused and separate agree to the bit, in all interleavings."""
    epilogue, fused_with_the_kernel = EPILOGUES[name]
    args = exact(1, 2, 96, 96, 16)
    gradients = backward(CAUSAL, scale=0.25)
    with emulate():
        separate = epilogue(*compiled(gradients)(*args))
    fused = compiled(lambda *args: epilogue(*gradients(*args)))
    for seed in range(4):
        with emulate(seed=seed):
            actual = fused(*args)
        launch = emulation.launches()[-1]
        assert launch.waits > 0
        assert ("copy" in launch.kernel or "mul" in launch.kernel) == fused_with_the_kernel, launch.kernel
        torch.testing.assert_close(actual, separate, rtol=0, atol=0)


@pytest.mark.parametrize(
    "epilogue",
    [
        # Fused with a kernel, which reads what it or the other one writes at the place of its output.
        lambda dq, dk, dv: (dq * 2 + dk, dk * dv, dv.relu()),
        lambda dq, dk, dv: (dq.half(), dk.bfloat16(), dv.half()),
        lambda dq, dk, dv: (dq + dq[:, :, :1], dk + dk.flip(2), dv - dv[:, :, -1:]),
        lambda dq, dk, dv: (dq.mul_(0.5).add_(dk), dk.mul_(0.5).add_(dv), dv.add_(1.0)),
    ],
    ids=["scaled by the others", "cast", "at another place", "in place"],
)
def test_two_passes(epilogue):
    args = exact(1, 2, 96, 96, 16, exponent=4)
    with enabled(template="two_pass"), emulate():
        assert differing_when_compiled(lambda *args: epilogue(*OP(*args, mask=FULL, scale=0.25)), args) == []
