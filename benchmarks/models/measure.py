"""Trains a model one step in the emulation, and looks at what became of its attentions, at its gradients and at their bits.

python -m benchmarks.models.measure FAMILY FILE
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.overrides import TorchFunctionMode
from transformers.integrations import flex_attention as integration

import dash_inductor
from dash_inductor import emulation

from ..reach.calls import Calls
from .families import CHECKPOINTING, DROPOUT, FAMILIES, Batch, Family

Gradients = dict[str, Tensor]
ZERO = 1e-9  # of the largest gradient of a model: such as a key's bias, which softmax does not see


class Float64(TorchFunctionMode):
    """What a model casts to fp32 becomes float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(widened, args), **{name: widened(x) for name, x in (kwargs or {}).items()})


def measure(name: str, case: str) -> dict[str, Any]:
    """The row of a family in a case; an exception is a row that says so."""
    row: dict[str, Any] = {"family": name, "case": case}
    try:
        return row | _measured(FAMILIES[name], case)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        return row | {"failure": f"{type(error).__name__}: {message}"}


def _measured(family: Family, case: str) -> dict[str, Any]:
    """Attentions called and decided on, the largest error of a gradient relative to its largest element and that of fp32 with
    attention written out, and which gradients have other bits in another interleaving. Under dropout, errors are against fp32."""
    if case == DROPOUT and not any(dropouts(config_of(family))):
        return {"left_out": "the configuration has none"}
    with _set_up(), inductor_config.patch(fallback_random=case == DROPOUT):  # what is dropped in eager mode is dropped then
        model, batch = model_of(family, case), family.batch(case)
        calls = _attention_calls(model, batch)
        if case == DROPOUT:
            with emulation.emulate():  # whose memory-efficient op drops the same when it is compiled
                in_fp32 = gradients_of(copy.deepcopy(model), batch)
        else:
            in_fp32 = gradients_written_out(model, batch, torch.float32)
        expected = in_fp32 if case == DROPOUT else gradients_written_out(model, batch, torch.float64)
        model.compile(dynamic=False)
        with emulation.emulate(seed=0):
            actual = gradients_of(model, batch)
        with emulation.emulate(seed=1):
            again = gradients_of(model, batch)
        waits = sum(launch.waits for launch in emulation.launches())
        decided = dash_inductor.decisions()
    error, worst = max(zip(errors_of(actual, expected), expected, strict=True))
    return {
        "calls": calls,
        "decisions": len(decided),
        "rewritten": dict(Counter(one.mask for one in decided if one.rewritten)),
        "declined": dict(Counter(str(one.reason) for one in decided if not one.rewritten)),
        "different_bits": [name for name in actual if not torch.equal(actual[name], again[name])],
        "waits": waits,
        "error": error,
        "worst": worst,
        "eager_error": None if case == DROPOUT else max(errors_of(in_fp32, expected)),
    }


def errors_of(actual: Gradients, expected: Gradients) -> list[float]:
    """The error of each gradient, relative to its largest element, or to the largest of all where it is 0 but for rounding."""
    largest = {name: x.abs().max().item() for name, x in expected.items()}
    of_all = max(largest.values(), default=0.0)
    scale = {name: own if own > ZERO * of_all else of_all for name, own in largest.items()}
    errors = [(actual[name] - x).abs().max().item() / scale[name] for name, x in expected.items()]
    return [error if error == error else float("inf") for error in errors]  # nan is the worst


@contextlib.contextmanager
def _set_up() -> Iterator[None]:
    """Deterministic mode and the pass are on, nothing comes out of a cache, and nothing is decided yet."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder))
        dash_inductor.clear_decisions()
        stack.enter_context(dash_inductor.enabled())
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        was = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, was)
        stack.callback(torch._dynamo.reset)
        torch.use_deterministic_algorithms(True)
        torch._dynamo.reset()
        emulation.clear_launches()
        yield


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """FlexAttention is asked for its logsumexp, as transformers does except on a CPU, where it refuses attention sinks."""
    source = inspect.getsource(integration.flex_attention_forward)
    is_gpu = 'query.device.type != "cpu"'
    if source.count(is_gpu) != 1:
        raise RuntimeError("transformers asks in another way whether it is on a CPU")
    scope = dict(vars(integration))
    exec(source.replace(is_gpu, "True"), scope)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    with mock.patch.dict(functions._global_mapping, flex_attention=scope["flex_attention_forward"]):
        yield


def config_of(family: Family) -> Any:
    """The configuration that its class has, but for sizes."""
    return getattr(transformers, family.config)(**family.sizes)


def dropouts(config: Any) -> Iterator[tuple[Any, str]]:
    """What is dropped with a probability other than 0, by (part of the configuration, name)."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            yield from dropouts(value)
        elif "drop" in name and isinstance(value, float) and value > 0:
            yield config, name


def model_of(family: Family, case: str) -> Any:
    """One that trains, without dropout but in the case of dropout."""
    torch.manual_seed(0)
    config = config_of(family)
    if case != DROPOUT:
        for part, name in list(dropouts(config)):
            setattr(part, name, 0.0)
    model = getattr(transformers, family.model)._from_config(config, attn_implementation=family.attention, **family.options)
    if case == CHECKPOINTING:
        model.activation_checkpointing_enable()
    return model.train()


def _attention_calls(model: Any, batch: Batch) -> int:
    """How often the forward calls attention where nothing is compiled."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    count = 0

    def counted(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return value.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None

    with Calls() as calls, mock.patch.dict(functions._global_mapping, flex_attention=counted):
        model(**batch)
    return count + calls.of_torch


def gradients_of(model: Any, batch: Batch) -> Gradients:
    """Those of the loss, by parameter."""
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    model(**batch).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def gradients_written_out(model: Any, batch: Batch, dtype: torch.dtype) -> Gradients:
    """The gradients in fp32 or float64, with attention written out."""
    reference = copy.deepcopy(model).to(dtype)
    reference.set_attn_implementation("eager")
    reference.activation_checkpointing_disable()  # a backward computes anew without the mode
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        return gradients_of(reference, {name: x.to(dtype) if _is_float(x) else x for name, x in batch.items()})


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def main(name: str, file: str) -> None:
    """Measure a family; the file gets a line of JSON when a case is done."""
    with open(file, "w") as out:
        for case in FAMILIES[name].cases:
            print(json.dumps(measure(name, case)), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
