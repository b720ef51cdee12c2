"""What follows an attention's gradients, and may be fused with its kernel, reads them only when they are complete."""

import pytest
import torch
from attention import OP, compiled, exact

from dash_inductor import emulation
from dash_inductor.emulation import emulate

pytestmark = pytest.mark.usefixtures("rewriting")


WEIGHT = torch.arange(2 * 96 * 16).view(1, 2, 96, 16) % 7


def packed(dq, dk, dv):
    """The gradient of one projection that made all three."""
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (dq, dk, dv)], -1)


def sum_of_all(dq, dk, dv):
    return dq + dk + dv


def scaled_by_the_other(dq, dk, dv):
    """Reads what the kernel writes beside its output, at the place of the output."""
    return dk * dv, dk.relu() + dq


def at_another_place(dq, dk, dv):
    """Row 0 of every head comes from other programs than those that read it."""
    return dk + dk[:, :, :1], dv - dv[:, :, -1:], dk + dv.flip(2), dk * dq.flip(2)


def cast(dq, dk, dv):
    return dq.bfloat16(), dk.bfloat16(), dv.half()


def sum_over_heads(dq, dk, dv):
    """The gradient of keys and values that were expanded over heads."""
    return dk.sum(1), dv.sum(1), dq.sum(1)


def scaled_by_an_input(dq, dk, dv):
    """Fused with the kernel, which reads one tensor more."""
    return dk * WEIGHT, dv, dq


def in_place(dq, dk, dv):
    """A gradient that is added to what was there."""
    return dk.mul_(0.5).add_(dv), dv.add_(1.0)


@pytest.mark.parametrize(
    ("epilogue", "fused_with_the_kernel"),
    [
        (packed, False),
        (sum_of_all, False),
        (scaled_by_the_other, False),
        (at_another_place, False),
        (sum_over_heads, False),
        (in_place, False),
        (cast, True),
        (scaled_by_an_input, True),
    ],
)
def test_epilogues(epilogue, fused_with_the_kernel):
    """Fused and separate agree to the bit, in all interleavings."""
    args = exact(1, 2, 96, 96, 16)

    def gradients(*args):
        return OP(*args, mask="causal", scale=0.25)

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
