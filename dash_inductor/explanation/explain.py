"""What becomes of each attention of a model in deterministic mode, and why: nothing is run.

FUNCTION returns (model, inputs), inputs being a tuple of arguments of the model's forward or a dict of keyword arguments, or
(model, arguments, keyword arguments). The model may be on the CPU or on the meta device, and the GPU need not be there.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from .. import config
from ..devices import DEVICES
from ..devices import device as named_device
from ..devices.cost_files import numbers_of
from ..explanation.report import Attention, Explanation
from ..reproduce.function import load
from .arguments import add_json
from .env import own_version

if TYPE_CHECKING:
    from torch import nn

    from ..decision import Decision

EXAMPLES = ("dash_inductor.cli.gpt:example --device h100", "train:setup --device b200 --json")
AS_ON = 'explain(model, ..., device="h100") (on the command line --device h100) says what that GPU would do'
EMULATED, CPU = "emulated", "cpu"


def explain(model: nn.Module, /, *inputs: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """What torch.compile of a training step of `model(*inputs, **kwargs)` would make of each attention, and why.

    Forward and backward are compiled up to the choice of kernels, in strict deterministic mode, or with warn_only where that is
    set already, for static shapes and whether or not the package is switched on. Nothing runs and nothing changes: parameters,
    gradients, buffers, random numbers, what torch.compile has compiled and `decisions()` stay as they are. No memory is
    allocated for tensors: model and inputs may be on the meta device.

        report = explain(model, tokens, device="h100")
        assert report.all_rewritten, report

    Args:
        model: compiled as a whole, in training or evaluation mode, as it is.
        inputs, kwargs: as the model is called. A forward that has an argument called `device` takes that one by position.
        device: a key of `dash_inductor.devices.DEVICES`, such as "h100": all tensors are taken to be on that GPU, which need not be
            there. None for the device that they are on, where the meta device stands for the GPU if there is one.

    Raises:
        ValueError: with the remedy, in one line: there is no such device, the model is no module, it reads a tensor's value outside
            of a graph, or the package is switched off.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"explain takes a torch.nn.Module and its inputs, not {type(model).__name__}: pass the model itself")
    if device is not None:
        named_device(device)
    if not config.ready().enabled:
        raise ValueError("dash_inductor is switched off by DASH_INDUCTOR=0: unset it to have the model explained")
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    with mock.patch.object(config, "_current", replace(config.current(), on_unsupported="fallback")):
        decisions, graphs, where, sms = _decided(model, inputs, kwargs, device)
        guarantee = config.current().guarantee
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    rows = tuple(Attention.of(decision, sms, warn_only=warn_only) for decision in decisions)
    return Explanation(where, rows, guarantee, warn_only, _versions(), tuple(_notes(model, rows, graphs, where)))


def _decided(model: nn.Module, inputs: Any, kwargs: Any, device: str | None) -> tuple[list[Decision], int, str, int]:
    """The decisions, the number of graphs, the name of the device, and its SMs."""
    import torch

    from .. import emulation
    from ..codegen.generate import deterministic
    from ..explanation import decisions, gpu_attention
    from ..explanation.joint_graphs import joint_graphs
    from ..explanation.no_trace import leaving_no_trace
    from ..hooks import install
    from ..hooks.hook import PATCHES

    def graphs_on(place: Any) -> Any:
        return joint_graphs(model, inputs, kwargs, place)

    cpu, was_enabled = torch.device("cpu"), install.is_enabled()
    install.install()
    try:
        with leaving_no_trace(), deterministic(warn_only=torch.is_deterministic_algorithms_warn_only_enabled()):
            if device is not None:
                decisions.require_compiler()
                with gpu_attention.attention_of(named_device(device)), PATCHES.paused():
                    graphs = graphs_on(cpu)
                return decisions.decide_on(device, graphs), len(graphs), device, named_device(device).sms
            devices = {x.device.type for x in (*model.parameters(), *model.buffers())}
            place = None
            if "meta" in devices:
                place = torch.device("cuda", 0) if torch.cuda.is_available() else cpu
            on_gpu = "cuda" in devices or (place is not None and place.type == "cuda")
            if on_gpu:
                where, sms = torch.cuda.get_device_name(), torch.cuda.get_device_properties().multi_processor_count
            else:
                where, sms = (EMULATED, config.current().sms) if emulation.active() else (CPU, 0)
            try:
                graphs = graphs_on(place)
            except NotImplementedError as error:  # of flex_attention
                if on_gpu:
                    raise
                raise ValueError(f"{_line(error)} {AS_ON}") from error
            return decisions.decisions_of(graphs), len(graphs), where, sms
    finally:
        if not was_enabled:
            install.uninstall()


def _versions() -> dict[str, str]:
    import torch
    import triton

    return {"dash_inductor": own_version(), "torch": torch.__version__, "triton": triton.__version__}


def _notes(model: nn.Module, rows: tuple[Attention, ...], graphs: int, where: str) -> list[str]:
    """What a reader of the report should know beside its rows."""
    notes = []
    if not rows:
        found = f"{graphs} graph{'s' if graphs != 1 else ''}"
        notes.append(
            f"no attention with a gradient was found in the {found} that torch.compile makes of the model. What counts are calls "
            "of scaled_dot_product_attention, flex_attention and varlen_attn on tensors that require a gradient, and attention "
            "written by hand where torch.compile recognises it"
        )
    keys = {row.decision.device for row in rows if row.rewritten}
    if any(entry.get("estimate") for key in keys for entry in numbers_of(key).values() if isinstance(entry, dict)):
        notes.append(
            "times come from a cost model whose constants are estimates for this device: they rank schedules, but measure nothing"
        )
    if where == CPU and rows:
        notes.append(f"the model is taken to be on the CPU, where attention stays as it is: {AS_ON}")
    if not model.training:
        notes.append("the model is in evaluation mode, where dropout is off: call model.train() before, to see it as it trains")
    return notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `explain`."""
    parser.add_argument("function", metavar="FUNCTION", help="package.module:function, which returns (model, inputs)")
    parser.add_argument("--device", metavar="GPU", help=f"{', '.join(DEVICES)}: explain for it; it need not be there")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report; ValueError, in one line, where there is none."""
    if args.device is not None:
        named_device(args.device)
    model, inputs, kwargs = _called(args.function, load(args.function))
    if not os.environ.get("TORCH_LOGS"):
        logging.disable(logging.CRITICAL)  # torch reports graph breaks and errors at length
    try:
        report = explain(model, *inputs, device=args.device, **kwargs)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"compiling the model of {args.function} failed: {_line(error).rstrip('.')}; does it train on these inputs?"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    print(report.to_json() if args.json else report)
    return 0


def _called(name: str, function: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model, its arguments and its keyword arguments; ValueError where the function gives none."""
    import torch

    try:
        returned = function()
    except Exception as error:
        raise ValueError(f"{name}() raised {_line(error)}; it must return (model, inputs)") from error
    wanted = f"{name}() must return (model, inputs), where inputs are a tuple of arguments or a dict of keyword arguments"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3) or not isinstance(returned[0], torch.nn.Module):
        raise ValueError(f"{wanted}, not {_kind(returned)}")
    model, *rest = returned
    args = next((tuple(x) for x in rest if isinstance(x, (tuple, list))), ())
    kwargs = next((dict(x) for x in rest if isinstance(x, Mapping)), {})
    if len(rest) != sum(isinstance(x, (tuple, list, Mapping)) for x in rest) or (
        len(rest) == 2 and not isinstance(rest[1], Mapping)
    ):
        raise ValueError(f"{wanted}, not {_kind(returned)}")
    if "device" in kwargs:
        raise ValueError(f"{name}() gives the model a keyword argument called device: give it by position")
    return model, args, kwargs


def _kind(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(type(x).__name__ for x in returned)})"
    return type(returned).__name__


def _line(error: BaseException) -> str:
    """The error in one line; of one that Dynamo reports, what it reports."""
    if match := re.search(r"\bgot (\w+)\(['\"](.+?)['\"]\)\s*$", str(error), re.MULTILINE):
        return f"{match[1]}: {match[2]}"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
