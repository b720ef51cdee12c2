"""Ops of attention that other packages bring: each backward in a training graph is told, with whether it is deterministic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch.nn.attention.flex_attention import flex_attention

import dash_inductor
from dash_inductor import decisions, explain
from dash_inductor.decision import is_of_torch
from dash_inductor.hooks import recording
from dash_inductor.rewrite.third_party import says_attention

pytestmark = pytest.mark.usefixtures("switched_off")
TESTS = Path(__file__).parents[1]
TENSORS = "Tensor dout, Tensor q, Tensor k, Tensor v"
WRITES = f"({TENSORS}, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, bool causal, bool deterministic=False) -> Tensor"
RETURNS = f"({TENSORS}, bool is_causal) -> (Tensor, Tensor, Tensor)"
UNNAMED = "(Tensor a, Tensor b, Tensor c, Tensor d) -> (Tensor, Tensor, Tensor)"


def written(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *flags: bool) -> Tensor:
    for x in (dq, dk, dv):
        x.fill_(1)
    return torch.zeros(3)


def returned(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *flags: bool) -> tuple[Tensor, ...]:
    return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)


OPS = {  # name -> (schema, what it does)
    "stand_in_flash_attn::_flash_attn_backward": (WRITES, written),
    "_flash_attn2_588b404::bwd": (WRITES, written),
    "xformers_flash::flash_bwd": (RETURNS, returned),
    "fancy::linear_attention_backward": (UNNAMED, returned),
    "stand_in_flash_attn::layer_norm_bwd_impl": (UNNAMED, returned),
    "stand_in::rotary_backward": (UNNAMED, returned),
}
LIBRARIES = [torch.library.Library(namespace, "FRAGMENT") for namespace in dict.fromkeys(name.split("::")[0] for name in OPS)]


def setup_module() -> None:
    for name, (schema, kernel) in OPS.items():
        library = next(x for x in LIBRARIES if x.ns == name.split("::")[0])
        library.define(name.split("::")[1] + schema)
        torch.library.impl(name, "CPU", kernel, lib=library)
        torch.library.register_fake(name, kernel, lib=library)
    recording._warned.clear()


class Attention(torch.autograd.Function):
    """Some forward; the backward is one of OPS, which may write into parts of one tensor, as packed query, key and value have."""

    @staticmethod
    def forward(ctx, q, k, v, name, deterministic):
        ctx.save_for_backward(q, k, v)
        ctx.name, ctx.deterministic = name, deterministic
        return q + k + v

    @staticmethod
    def backward(ctx, dout):
        q, k, v = ctx.saved_tensors
        namespace, name = ctx.name.split("::")
        op, schema = getattr(getattr(torch.ops, namespace), name), OPS[ctx.name][0]
        if schema is not WRITES:
            return *op(dout, q, k, v, *([True] if schema is RETURNS else [])), None, None
        gradients = torch.empty(*q.shape[:2], 3, *q.shape[2:]).unbind(2)
        op(dout, q, k, v, *gradients, True, ctx.deterministic)
        return *gradients, None, None


class Model(nn.Module):
    def __init__(self, name: str, deterministic: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.call: Callable[[Tensor], Tensor] = lambda x: Attention.apply(*x.chunk(3, -1), name, deterministic)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.qkv(x)) * 2


X = torch.randn(2, 16, 4, 8)  # [B, S, H, D]
TOLD = {
    ("stand_in_flash_attn::_flash_attn_backward", False): (False, "not deterministic as it is called (deterministic=False)"),
    ("stand_in_flash_attn::_flash_attn_backward", True): (
        None,
        "by its own flag (deterministic=True), which nobody here has looked",
    ),
    ("_flash_attn2_588b404::bwd", False): (False, "not deterministic as it is called"),
    ("xformers_flash::flash_bwd", False): (False, "which is not deterministic"),
    ("fancy::linear_attention_backward", False): (None, "not known whether it is deterministic"),
}


@pytest.mark.parametrize("functionalized", [2, 1])
@pytest.mark.parametrize(("name", "flag"), TOLD, ids=str)
def test_explain_has_a_row(name: str, flag: bool, functionalized: int) -> None:
    torch._dynamo.reset()
    deterministic, reason = TOLD[name, flag]
    with inductor_config.patch(enable_auto_functionalized_v2=functionalized == 2):
        found = explain(Model(name, flag), X)
    (row,) = found
    assert not found.all_rewritten and not row.rewritten and row.op == f"{name.replace('::', '.')}.default"
    assert row.deterministic is deterministic and reason in str(row.reason) and row.remedy
    sizes = "B=2 H=4 S=16 D=8 fp32" if "xformers" in name else "[2, 16, 4, 8] fp32"  # the order of dimensions is known of some
    assert (row.decision.shape == sizes) == (row.decision.mask == "causal") == ("linear" not in name)
    assert row.stock_workspace_bytes is None and __file__ in (row.decision.source or "")


@pytest.mark.parametrize("name", list(OPS)[-2:])
def test_what_is_no_attention(name: str) -> None:
    torch._dynamo.reset()
    assert len(explain(Model(name), X)) == 0


def test_what_trains_nothing_is_not_told() -> None:
    torch._dynamo.reset()
    dash_inductor.clear_decisions()
    with dash_inductor.enabled(on_unsupported="error"), torch.no_grad():
        torch.compile(Model("_flash_attn2_588b404::bwd"))(X)
    assert decisions() == []


def train(name: str, deterministic: bool = False, **settings: object) -> list[str]:
    """What is told."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught, dash_inductor.enabled(**settings):
        warnings.simplefilter("always")
        torch.compile(Model(name, deterministic))(X).sum().backward()
    return [str(warning.message) for warning in caught if "dash_inductor" in str(warning.message)]


FLASH, UNKNOWN = "stand_in_flash_attn::_flash_attn_backward", "fancy::linear_attention_backward"


def test_one_that_is_not_deterministic_is_told_once_in_a_process() -> None:
    """Even under "fallback", where torch's own ops raise; from a warm cache too."""
    recording._warned.clear()
    (message,) = train(FLASH)
    assert "deterministic=False" in message and "FLASH_ATTENTION_DETERMINISTIC=1" in message and "varlen_attn" in message
    assert train(FLASH) == [] == train(FLASH, deterministic=True)
    recording._warned.clear()
    assert train(FLASH) == [message]
    recording._warned.clear()
    assert train(FLASH, silence="stand_in_flash_attn") == []


def test_settings_say_what_happens() -> None:
    assert train(UNKNOWN) == []
    assert "is not known whether" in train(UNKNOWN, on_unsupported="warn")[0]
    for name in (FLASH, UNKNOWN):
        with pytest.raises(BackendCompilerFailed, match="UnsupportedAttentionError"):
            train(name, on_unsupported="error")
        for silence in (name, name.split("::")[0], f"other,{name.replace('::', '.')}.default"):
            train(name, on_unsupported="error", silence=silence)
    assert train(FLASH, deterministic=True, on_unsupported="error") == []


class FlashAttnFunc(torch.autograd.Function):
    """Calls what Dynamo cannot trace."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, deterministic=False, fails=False):
        torch._dynamo.graph_break()
        if fails:
            raise TypeError("no tensor of a GPU")
        return q + k + v

    @staticmethod
    def backward(ctx, dout):
        return dout, dout, dout, None, None, None


class RotaryFunc(FlashAttnFunc):
    """Is no attention."""


class AttentionFunc(torch.autograd.Function):
    """Is traced, so that its backward is in a graph."""

    @staticmethod
    def forward(ctx, q, k, v, *_):
        return q + k + v

    @staticmethod
    def backward(ctx, dout):
        return dout, dout, dout, None, None, None


class Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], *flags: bool) -> None:
        super().__init__()
        self.function, self.flags, self.weight = function, flags, nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return self.function.apply(x, 2 * x, 3 * x, *self.flags)


def explained(*layers: Layer) -> dash_inductor.Explanation:
    model = nn.Sequential(*layers)
    return explain(model, torch.ones(2, 24, 3, 16, device="meta"), device="h100")


@pytest.mark.parametrize(
    ("module", "flags", "deterministic", "said"),
    [
        ("flash_attn.cute.interface", (True, False), False, "not deterministic as it is called"),
        ("flash_attn.cute.interface", (False, True), True, "deterministic as it is called"),
        ("flash_attn_interface", (False, True), None, "unproven: https://github.com/Dao-AILab/flash-attention/issues/2244"),
        ("flash_attn3_1a2b", (False, True), None, "by its own flag (deterministic=True), which nobody here has looked into"),
    ],
)
def test_an_autograd_function_that_breaks_the_graph_has_a_row(
    monkeypatch: pytest.MonkeyPatch, module: str, flags: tuple[bool, ...], deterministic: bool | None, said: str
) -> None:
    monkeypatch.setattr(FlashAttnFunc, "__module__", module)
    stock = vars(torch.autograd.Function)["apply"]
    report = explained(Layer(RotaryFunc), Layer(FlashAttnFunc, *flags), Layer(AttentionFunc))
    assert report.stopped is None and not report.all_rewritten
    (row,) = report
    assert row.deterministic is deterministic and said in str(row.reason) and "breaks the graph" in str(row.reason)
    assert (row.op, row.module) == (f"{module}.FlashAttnFunc", "1") and "test_third_party.py" in str(row.source)
    sizes = "[2, 24, 3, 16] fp32" if "1a2b" in module else "B=2 H=3 S=24 D=16 fp32"
    assert (row.decision.shape, row.decision.mask) == (sizes, "causal" if flags[0] else "full")
    assert "keeps the package's" in str(report) and "scaled_dot_product_attention" in str(row.remedy)
    assert vars(torch.autograd.Function)["apply"] is stock


class InPython(nn.Module):
    """SDPA in a function that Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    @torch._dynamo.disable
    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x * self.weight).relu()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_sdpa_that_is_left_to_python_has_a_row(device: str) -> None:
    model = nn.Sequential(InPython(), InPython())
    report = explain(model, torch.ones(2, 3, 256, 16, device=device, dtype=torch.bfloat16), device="h100")
    assert [(row.module, row.rewritten) for row in report] == [("0", False), ("1", False)]
    assert all(row.deterministic and "outside of the graphs" in str(row.reason) and row.remedy for row in report)
    assert report.attentions[0].decision.mask == "causal"


class Flex(nn.Module):
    """FlexAttention, of which AOTAutograd applies an autograd function while it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return flex_attention(x * self.weight, x, x)


def test_what_torch_applies_while_it_traces_has_none() -> None:
    report = explain(Flex(), torch.ones(2, 3, 256, 16, device="meta", dtype=torch.bfloat16), device="h100")
    assert ["flex_attention" in row.op for row in report] == [True]


def test_an_autograd_function_that_ends_the_forward_has_a_row() -> None:
    report = explained(Layer(FlashAttnFunc, False, False, True), Layer(FlashAttnFunc))
    assert "no tensor of a GPU" in str(report.stopped) and len(report.attentions) == 1 and not report.all_rewritten


@pytest.mark.parametrize("silence", ["a b", "flash_attn;fla"])
def test_bad_names(silence: str) -> None:
    with pytest.raises(ValueError, match="is not names of ops or namespaces"), dash_inductor.enabled(silence=silence):
        pass


def test_every_op_of_torch_that_says_attention_is_torchs() -> None:
    """None of its namespaces is forgotten. What tests define is left out: pytest imports the stand-ins of other tests as well."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op.partition(".")[0])
        found = getattr(packet, packet.overloads()[0])
        is_of_tests = f"registered at {TESTS}" in torch._C._dispatch_dump(name)
        assert is_of_tests or not says_attention(found) or is_of_torch(str(found)), name
