"""What becomes of each attention of a model in deterministic mode, and why: nothing is run.

FUNCTION returns (model, inputs), inputs being a tuple of arguments of the model's forward or a dict of keyword arguments, or
(model, arguments, keyword arguments). The model may be on the CPU or on the meta device, and the GPU need not be there. The exit
status is 0 if there are attentions and all of them are rewritten, 1 if not, and 2 if the model cannot be explained. With
--deterministic it is 0 if all of them have the same bits in every run, rewritten or not.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..devices import DEVICES
from ..devices import device as named_device
from ..explanation.explain import explain
from ..reproduce.function import load
from ..text import in_one_line
from .arguments import add_json

EXAMPLES = ("dash_inductor.cli.gpt:example --device h100", "train:setup --device b200 --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `explain`."""
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function, which returns (model, inputs)")
    purpose = f"{', '.join(DEVICES)}: explain for it; it need not be there"
    parser.add_argument("--device", type=str.lower, metavar="GPU", help=purpose)
    parser.add_argument("--deterministic", action="store_true", help="exit with 0 where all have the same bits in every run")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 unless all attentions are rewritten, or deterministic; ValueError, in one line, where there is none."""
    if args.device is not None:
        named_device(args.device)
    model, inputs, kwargs = called(args.function, load(args.function))
    with quiet():
        report = explain(model, *inputs, device=args.device, **kwargs)
    print(report.to_json() if args.json else report)
    return int(not (report.all_deterministic if args.deterministic else report.all_rewritten))


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch logs, unless TORCH_LOGS asks for that: it reports graph breaks and errors at length."""
    if not os.environ.get("TORCH_LOGS"):
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def called(name: str, function: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model, its arguments and its keyword arguments; ValueError where the function gives none."""
    import torch

    try:
        returned = function()
    except Exception as error:
        raise ValueError(f"{name}() raised {in_one_line(error)}; it must return (model, inputs)") from error
    wanted = f"{name}() must return (model, inputs), where inputs are a tuple of arguments or a dict of keyword arguments"
    match returned:
        case torch.nn.Module() as model, tuple() | list() as args, Mapping() as kwargs:
            pass
        case torch.nn.Module() as model, tuple() | list() as args:
            kwargs = {}
        case torch.nn.Module() as model, Mapping() as kwargs:
            args = ()
        case _:
            kind = type(returned).__name__
            if isinstance(returned, tuple):
                kind = f"({', '.join(type(x).__name__ for x in returned)})"
            raise ValueError(f"{wanted}, not {kind}")
    if "device" in kwargs:
        raise ValueError(f"{name}() gives the model a keyword argument called device: give it by position")
    return model, tuple(args), dict(kwargs)
