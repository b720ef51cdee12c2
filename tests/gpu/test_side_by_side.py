"""Our kernel beside others at the same time in one process."""

import pytest
import torch
from test_on_gpu import DEVICE, LAUNCHES, ONE_PASS, attention, backward_of, gradients, inputs

import dash_inductor

NEVER_SERIALISED = (
    "Two cooperative launches at once do not come one after the other on this driver: their CTAs wait for each other's SMs. "
    'Document it, and use `launch="chained"` where several streams run backwards'
)


def at_once(*launches):
    """How many elements differ from those of a launch alone, while each of `launches` runs on a stream of its own."""
    alone = [launch() for launch in launches]
    streams = [torch.cuda.Stream() for _ in launches]
    differing = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in launches]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(LAUNCHES):
        for stream, launch, expected, count in zip(streams, launches, alone, differing, strict=True):
            with torch.cuda.stream(stream):  # the host waits for nothing
                for grad, right in zip(launch(), expected, strict=True):
                    count += (grad != right).sum()
    torch.cuda.synchronize()
    return [count.item() for count in differing]


def test_two_cooperative_launches_at_once():
    """Either takes more than half of the SMs: if both had some of their CTAs running, these would wait for the others for ever."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    leaves, grad_out = inputs(1, 2 * sms, 2 * sms, 2048, 2048, 64)
    with dash_inductor.enabled(schedule="descending", launch="grouped", **ONE_PASS):
        launch = backward_of(True, leaves, grad_out)
    decision = dash_inductor.decisions()[-1]
    assert decision.launch == "grouped" and 2 * decision.roles * decision.heads_in_flight > sms
    try:
        differing = at_once(launch, launch)
    except RuntimeError as fault:
        pytest.fail(f"{NEVER_SERIALISED}: {fault}")
    assert differing == [0, 0]


def test_eager_and_compiled_at_once():
    """Stock attention in eager mode takes SMs that our CTAs wait for; the bits of both are those that they have alone."""
    leaves, grad_out = inputs(2, 8, 8, 2048, 2048, 128)
    with dash_inductor.enabled(**ONE_PASS):
        compiled = backward_of(True, leaves, grad_out)
    eager = attention(True)
    assert at_once(compiled, lambda: gradients(eager, leaves, grad_out)) == [0, 0]
