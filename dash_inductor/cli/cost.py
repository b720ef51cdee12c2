"""What deterministic mode costs of a training step of a model: forward and backward, without the optimizer.

FUNCTION returns (model, inputs), as for `explain`. On a GPU the step runs in three ways, and kernels are timed by groups: not
deterministic, in torch's strict mode, and in that mode with this package. With --device nothing runs, and the GPU need not be
there: attention has the times of its prices, matmuls those of a stated rate, and the other operators that strict mode changes are
named and counted. The exit status is 2 where the model cannot be compiled.
"""

from __future__ import annotations

import argparse

from ..devices import DEVICES
from ..devices import device as named_device
from ..reproduce.function import load
from .arguments import add_json, at_least
from .console import CommandError
from .explain import called, quiet

EXAMPLES = ("dash_inductor.cli.gpt:example --device h100", "train:setup --device a100 --matmul-tflops 200 --json", "train:setup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cost`."""
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function, which returns (model, inputs)")
    purpose = f"{', '.join(DEVICES)}: predict for it; it need not be there"
    parser.add_argument("--device", type=str.lower, metavar="GPU", help=purpose)
    rate = "of matmuls in 16 bits, with --device (default: two thirds of the published peak)"
    parser.add_argument("--matmul-tflops", type=at_least(1), metavar="TFLOPS", help=rate)
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report."""
    from ..step_cost.measured import measured
    from ..step_cost.predicted import predicted

    if args.device is None and args.matmul_tflops is not None:
        raise CommandError("--matmul-tflops goes with --device: on the GPU that is there matmuls are measured")
    if args.device is not None:
        named_device(args.device)
    model, inputs, kwargs = called(args.function, load(args.function))
    with quiet():
        if args.device is None:
            cost = measured(model, inputs, kwargs)
        else:
            cost = predicted(model, inputs, kwargs, args.device, args.matmul_tflops)
    print(cost.to_json() if args.json else cost)
    return 0
