"""Random attentions under random settings and modes of torch: rewritten and right, or declined with a reason, or stock's own error.

An example is one training step, a graph of one attention or two. HYPOTHESIS_PROFILE=nightly tries 1,000 of them, all else 10.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import FP32_ERROR, error
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tensors import BF16, FP16, FP32, columns, in_eighths, normal, padded, permuted
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from dash_inductor import UnsupportedAttentionError, clear_decisions, config, decisions, emulation, enabled

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
PARTS, EXAMPLES = (8, 125) if NIGHTLY else (1, 10)  # parts can run side by side; examples of each
FP64 = torch.float64
FAILED, WRONG = "failed as stock does", "wrong as stock is"
FLOOR = {FP64: 1e-12, FP32: FP32_ERROR, FP16: 2**-8, BF16: 2**-5}  # errors that rounding explains
LAYOUTS = {
    "contiguous": lambda tensors: list(tensors),
    "[B, S, H, D] in memory": permuted,
    "the last stride is not 1": columns,
    "rows of an odd pitch": padded,
    "stride 0 over heads": lambda tensors: [x[:, :1].expand(x.shape) for x in tensors],
    "one memory for all three": lambda tensors: packed(tensors),
}
SDPA_MASKS = ["none", "is_causal", "window", "float window", "documents", "input", "constant", "learnt"]
FLEX_MASKS = ["none", "is_causal", "window", "documents"]
SCORE_MODS = ["none", "softcap", "by distance", "learnt"]
WINDOW = 9


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Columns of one memory, [B, S, all columns], where lengths are the same."""
    if len({x.shape[2] for x in tensors}) > 1:
        return list(tensors)
    rows = [x.transpose(1, 2).flatten(2) for x in tensors]
    parts = torch.cat(rows, 2).split([x.shape[2] for x in rows], 2)
    return [part.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2) for part, x in zip(parts, tensors, strict=True)]


@dataclass(frozen=True)
class Attention:
    """One attention of a graph; `call` is the function of torch that it is written with."""

    call: str = "sdpa"
    mask: str = "none"
    score_mod: str = "none"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 20
    kv_len: int = 20
    head_dim: int = 16
    value_dim: int = 16
    dtypes: tuple[torch.dtype, ...] = (FP32,) * 3
    layout: str = "contiguous"
    scale: float | str | None = None
    dropout: float = 0.0
    trains: tuple[bool, ...] = (True,) * 3
    grouped: bool = field(init=False)  # made here: Dynamo has symbols for sizes that are dynamic, and torch takes none for a flag

    def __post_init__(self) -> None:
        object.__setattr__(self, "grouped", self.heads != self.kv_heads)

    def inputs(self) -> list[Tensor]:
        """query, key, value, and what the mask or the bias is made of."""
        q = (self.batch, self.heads, self.q_len, self.head_dim)
        k, v = ((self.batch, self.kv_heads, self.kv_len, dim) for dim in (self.head_dim, self.value_dim))
        tensors = [
            in_eighths(normal(*shape, seed=seed)).to(dtype)
            for seed, (shape, dtype) in enumerate(zip((q, k, v), self.dtypes, strict=True))
        ]
        if self.call == "varlen":
            tensors = [x[0].transpose(0, 1) for x in tensors]
        elif not (self.layout == "one memory for all three" and len({*self.dtypes}) > 1):
            tensors = LAYOUTS[self.layout](tensors)
        tensors = [x.detach().requires_grad_(trains) for x, trains in zip(tensors, self.trains, strict=True)]
        if self.mask == "learnt":
            return [*tensors, normal(self.heads, self.q_len, self.kv_len, seed=7).to(self.dtypes[0]).requires_grad_()]
        if self.score_mod == "learnt":
            return [*tensors, normal(self.heads, seed=7).requires_grad_()]
        if self.mask == "documents":
            return [*tensors, torch.arange(max(self.q_len, self.kv_len)) // 8]
        return [*tensors, self.visible()] if self.mask == "input" else tensors

    def visible(self, ids: Tensor | None = None) -> Tensor:
        """bool [S_q, S_k]: which keys a query sees, every one at least its first."""
        m, n = torch.arange(self.q_len)[:, None], torch.arange(self.kv_len)
        if self.mask in ("none", "learnt"):
            return (m >= 0) & (n >= 0)
        if self.mask == "is_causal":
            return n <= m + (self.kv_len - self.q_len if self.call == "varlen" else 0)
        if self.mask == "documents":
            ids = torch.arange(max(self.q_len, self.kv_len)) // 8 if ids is None else ids
            return (ids[m] == ids[n]) | (n == 0)
        if self.mask == "constant":
            return (m >= 0) & (n % 3 != 1)
        return ((n <= m) & (n > m - WINDOW)) | (n == 0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Any:
        """As a user writes it."""
        return {"sdpa": self.sdpa, "flex": self.flex, "varlen": self.varlen, "by hand": self.by_hand}[self.call](
            query, key, value, *others
        )

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        """F.scaled_dot_product_attention."""
        mask: Tensor | None = None
        if self.mask in ("input", "learnt"):
            (mask,) = others
        elif self.mask == "constant":
            mask = torch.tensor([[key % 3 != 1 for key in range(self.kv_len)]])
        elif self.mask in ("window", "documents"):
            mask = self.visible(*others)
        elif self.mask == "float window":
            mask = torch.where(self.visible(), 0.0, -math.inf).to(query.dtype)
        scale: Any = torch.tensor(0.3) if self.scale == "tensor" else self.scale
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=self.mask == "is_causal",
            scale=scale,
            enable_gqa=self.grouped,
        )

    def by_hand(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        """What Inductor makes SDPA of."""
        return torch.softmax(query @ key.mT * self.softmax_scale, -1) @ value

    def flex(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Any:
        """flex_attention."""
        ids = others[0] if self.mask == "documents" else None
        mods = {
            "is_causal": lambda b, h, m, n: n <= m,
            "window": lambda b, h, m, n: ((n <= m) & (n > m - WINDOW)) | (n == 0),
            "documents": lambda b, h, m, n: (ids[m] == ids[n]) | (n == 0),
        }
        mask = None
        if self.mask != "none":
            mask = create_block_mask(mods[self.mask], None, None, self.q_len, self.kv_len, device="cpu", BLOCK_SIZE=32)
        bias = others[-1] if self.score_mod == "learnt" else None
        scores = {
            "none": None,
            "softcap": lambda s, b, h, m, n: 2.0 * torch.tanh(s / 2.0),
            "by distance": lambda s, b, h, m, n: s + 0.1 * (n - m),
            "learnt": lambda s, b, h, m, n: s + bias[h],
        }[self.score_mod]
        scale: Any = torch.tensor(0.3) if self.scale == "tensor" else self.scale
        return flex_attention(query, key, value, score_mod=scores, block_mask=mask, scale=scale, enable_gqa=self.grouped)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Any:
        """varlen_attn of one sequence; window and causal masks are aligned at the last query and key."""
        cu_q, cu_k = (torch.tensor([0, *accumulate([length])], dtype=torch.int32) for length in (self.q_len, self.kv_len))
        window = (-1, 0) if self.mask == "is_causal" else (-1, -1)
        scale: Any = None if self.scale == "tensor" else self.scale
        return varlen_attn(query, key, value, cu_q, cu_k, self.q_len, self.kv_len, window_size=window, scale=scale)

    @property
    def softmax_scale(self) -> float:
        """The number."""
        return {None: 1 / math.sqrt(self.head_dim), "tensor": 0.3}.get(self.scale, self.scale)  # type: ignore[call-overload, return-value]

    def wide(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        """The attention, written in matmuls, of float64."""
        if self.call == "varlen":
            query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        key, value = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (key, value))
        scale = 1 / math.sqrt(self.head_dim) if self.call == "varlen" and self.scale == "tensor" else self.softmax_scale
        scores = query @ key.mT * scale
        m, n = torch.arange(self.q_len)[:, None], torch.arange(self.kv_len)
        if self.mask == "learnt":
            scores = scores + others[0]
        if self.score_mod == "softcap":
            scores = 2.0 * torch.tanh(scores / 2.0)
        elif self.score_mod == "by distance":
            scores = scores + 0.1 * (n - m)
        elif self.score_mod == "learnt":
            scores = scores + others[-1][:, None, None]
        seen = self.visible()
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).where(seen.any(-1, keepdim=True), 0.0)
        out = weights @ value
        return out[0].transpose(0, 1) if self.call == "varlen" else out


@dataclass(frozen=True)
class Step:
    """One graph, how it is compiled, and how it is trained."""

    attentions: tuple[Attention, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    deterministic: str = "strict"
    dynamic: bool | None = False
    fullgraph: bool = True
    mode: str | None = None
    backend: str = "inductor"
    autocast: torch.dtype | None = None
    checkpointed: bool = False
    backward: str = "once"
    late: bool = False
    seed: int = 0
    sms: int = 6
    head_dims_known: bool = False  # where sizes are dynamic, a length that is the same number is known then, too

    def function(self, *inputs: list[Tensor]) -> list[Tensor]:
        """All attentions, each of its own inputs."""
        if self.head_dims_known:
            for tensor in (x for of_one in inputs for x in of_one[:3]):
                for _ in range(tensor.shape[-1]):  # which Dynamo unrolls
                    pass
        # Dynamo traces no flex_attention inside a checkpoint.
        attend = [
            (lambda *x, a=a: checkpoint(a, *x, use_reentrant=False)) if self.checkpointed and a.call != "flex" else a  # type: ignore[misc]
            for a in self.attentions
        ]
        with torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext():
            return [call(*x) for call, x in zip(attend, inputs, strict=True)]

    @property
    def emulated(self) -> dict[str, int]:
        """The device."""
        return {"seed": self.seed, "sms": self.sms}


@contextlib.contextmanager
def deterministic_mode(mode: str) -> Iterator[None]:
    """off, strict or warn_only."""
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn_only")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def gradients_of(step: Step) -> list[list[Tensor | None]]:
    """The outputs, and the gradients of the inputs that train, of each attention; compiled.

    A second backward takes another interleaving and must give the same bits, but of what a stock flex_attention sums by atomics: a
    gradient of what score_mod captures, where one is not rewritten. Second derivatives are refused, or not there, as of everything
    compiled.
    """
    torch._dynamo.reset()
    counters.clear()
    inputs = [a.inputs() for a in step.attentions]
    leaves = [x for of_one in inputs for x in of_one if x.requires_grad]
    options: dict[str, Any] = {"mode": step.mode} if step.backend == "inductor" else {"backend": step.backend}
    function = torch.compile(step.function, dynamic=step.dynamic, fullgraph=step.fullgraph, **options)
    torch.manual_seed(5)
    outs = function(*inputs)
    trained = [(out, grad_out(out)) for out in outs if out.requires_grad]
    gradient_of: dict[int, Tensor | None] = {}
    if trained:
        of, by = zip(*trained, strict=True)
        keep = {"once": {}, "twice": {"retain_graph": True}, "double": {"create_graph": True}}[step.backward]
        grads = torch.autograd.grad(of, leaves, by, allow_unused=True, **keep)
        if step.backward == "twice":
            others = step.emulated | {"seed": step.seed + 1}
            with emulation.emulate(**others) if emulation.active() else contextlib.nullcontext():
                again = torch.autograd.grad(of, leaves, by, allow_unused=True)
            learnt = {id(of_one[-1]) for a, of_one in zip(step.attentions, inputs, strict=True) if a.score_mod == "learnt"}
            by_atomics = learnt if counters["inductor"]["dash_rewritten"] < len(step.attentions) else set()
            for leaf, first, second in zip(leaves, grads, again, strict=True):
                same = first is second is None or torch.equal(first, second)
                assert same or id(leaf) in by_atomics, f"the second backward differs: a gradient {[*leaf.shape]}"
        of_grads = [x.sum() for x in grads if x is not None and x.requires_grad]
        if step.backward == "double" and of_grads and not counters["graph_break"]:
            with contextlib.suppress(RuntimeError):
                of_second = torch.autograd.grad(of_grads, leaves, allow_unused=True)
                assert all(x is None for x in of_second), "a second derivative of a compiled graph"
        gradient_of = dict(zip(map(id, leaves), grads, strict=True))
    return [[out.detach(), *(gradient_of.get(id(x)) for x in of_one)] for out, of_one in zip(outs, inputs, strict=True)]


def grad_out(out: Tensor) -> Tensor:
    """The gradient that a backward begins with."""
    return in_eighths(normal(*out.shape, seed=11)).to(out.dtype)


def references(step: Step) -> list[list[Tensor | None]]:
    """The same in float64."""
    wide = []
    for a in step.attentions:
        inputs = [x.detach().double() if x.is_floating_point() else x for x in a.inputs()]
        trains = [x.requires_grad for x in a.inputs()]
        for x, needed in zip(inputs, trains, strict=True):
            x.requires_grad_(needed)
        out = a.wide(*inputs)
        leaves = [x for x in inputs if x.requires_grad]
        grads = iter(torch.autograd.grad(out, leaves, grad_out(out), allow_unused=True) if leaves else ())
        wide.append([out.detach(), *(next(grads) if needed else None for needed in trains)])
    return wide


def without_the_pass() -> contextlib.AbstractContextManager[None]:
    return config.within(replace(config.current(), enabled=False))


def fails_alike(step: Step, raised: Exception) -> bool:
    """Whether the same step raises the same without this package's pass: traced alone, or by Inductor under emulation, also where
    it knows head dims, as this package has to."""

    def kind(failure: Exception) -> tuple[type, type, str]:
        inner = getattr(failure, "inner_exception", failure)
        return type(failure), type(inner), str(inner).partition("\n")[0]

    emulated = (emulation.emulate(**step.emulated) for _ in range(2))
    ways = (
        (replace(step, backend="aot_eager"), contextlib.nullcontext()),
        *zip((step, replace(step, head_dims_known=True)), emulated, strict=True),
    )
    for way, device in ways:
        try:
            with device, deterministic_mode(step.deterministic), without_the_pass():
                gradients_of(way)
        except Exception as stock:
            if kind(stock) == kind(raised):
                return True
    return False


def are_of_stock(step: Step, actual: dict[int, list[Tensor | None]]) -> bool:
    """Whether Inductor gives some attentions of a step the same under emulation without this package's pass, to the bit."""
    with deterministic_mode(step.deterministic), emulation.emulate(**step.emulated), without_the_pass():
        stock = gradients_of(step)
    try:
        torch.testing.assert_close(actual, {index: stock[index] for index in actual}, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def check(step: Step) -> str:
    """Asserts that the step is right, or fails as it should; what became of it, in words."""
    clear_decisions()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            late = functorch_config.patch(force_non_lazy_backward_lowering=not step.late)
            with deterministic_mode(step.deterministic), enabled(**step.settings), emulation.emulate(**step.emulated), late:
                actual = gradients_of(step)
    except ValueError as refused:
        if any(name in str(refused).partition("=")[0] for name in ("launch", "template", "kernel", "sm_reserve")):
            assert "\n" not in str(refused)
            return "settings that exclude one another"
        assert fails_alike(step, refused), refused
        return FAILED
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, UnsupportedAttentionError):
            assert step.settings.get("on_unsupported") == "error" and step.deterministic != "off"
            return "declined with an error"
        assert fails_alike(step, failed), failed
        return FAILED
    except AssertionError:
        raise
    except Exception as raised:
        assert fails_alike(step, raised), raised
        return FAILED
    taken = decisions()
    if step.deterministic == "off":
        assert not taken
    for decision in taken:
        assert decision.rewritten or (decision.reason and decision.remedy), decision
        assert "did not compile" not in (decision.reason or ""), decision
    trained = [a for a in step.attentions if (a.call != "by hand" and any(a.trains)) or "learnt" in (a.mask, a.score_mod)]
    if step.deterministic != "off" and not counters["graph_break"]:  # at which torch leaves attention to eager mode
        assert len(taken) >= len(trained), f"{len(taken)} decisions for {len(trained)} attentions: {taken}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong: dict[int, AssertionError] = {}
        for index, (a, got, right) in enumerate(zip(step.attentions, actual, references(step), strict=True)):
            try:
                assert_close(step, a, got, right)
            except AssertionError as failure:
                wrong[index] = failure
        if wrong:
            if not are_of_stock(step, {index: actual[index] for index in wrong}):
                raise next(iter(wrong.values()))
            return WRONG
    if any(d.rewritten for d in taken):
        return "rewritten, right"
    return "declined, right" if taken else "without the pass, right"


def assert_close(step: Step, a: Attention, got: list[Tensor | None], right: list[Tensor | None]) -> None:
    """Each value of one attention, against float64."""
    if a.dropout:
        return  # random bits; test_dropout.py knows them
    low = max((step.autocast or FP64, *a.dtypes), key=lambda dtype: FLOOR[dtype])
    if low is FP64 and (a.call == "varlen" or a.head_dim != a.value_dim):
        low = FP32  # in which the emulated ops of a GPU sum
    for name, x, y in zip(("out", "dq", "dk", "dv", "other"), got, right, strict=False):
        assert (x is None) == (y is None), f"{name} of {a}"
        if x is not None and y is not None:
            assert x.isfinite().all(), f"{name} is not finite: {a}"
            allowed = FLOOR[low] * max(1.0, a.q_len / 16) ** 0.5
            if name == "other":  # stock's, a sum over batch elements or rows of what was rounded
                allowed *= 4 * a.batch
            # Where a query sees one key, dq and dk are zero: what is left is rounding, times the scale.
            scaled = max(1.0, abs(a.softmax_scale) * a.head_dim**0.5) if name in ("dq", "dk") else 1.0
            found = error(x, y, least=scaled)
            assert found <= allowed, f"{name}: error {found:.2e}, allowed {allowed:.2e}: {a}"


# Sizes and options: mostly what is taken, now and then what is not.

LENGTHS = st.sampled_from([1, 2, 3, 7, 16, 17, 20, 31, 32, 33, 40])
HEAD_DIMS = st.sampled_from([16] * 12 + [1, 2, 3, 8, 19, 24, 32, 33, 64, 100, 128, 129, 192, 256, 257, 300])
ONE_DTYPE = [(dtype,) * 3 for dtype in [FP32] * 20 + [BF16] * 10 + [FP16] * 6 + [FP64] * 2]
DTYPES = st.sampled_from([*ONE_DTYPE, (FP32, BF16, FP32), (BF16, BF16, FP32)])
HEADS = st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (4, 1), (6, 3)] * 6 + [(4, 3), (2, 4)])


@st.composite
def attentions(draw: Any) -> Attention:
    call = draw(st.sampled_from(["sdpa"] * 5 + ["flex"] * 2 + ["varlen", "by hand"]))
    heads, kv_heads = draw(HEADS)
    q_len, head_dim = draw(LENGTHS), draw(HEAD_DIMS)
    kv_len = draw(st.one_of(st.just(q_len), LENGTHS))
    value_dim = draw(st.one_of(st.just(head_dim), st.just(head_dim), HEAD_DIMS))
    mask = draw(
        st.sampled_from({"sdpa": SDPA_MASKS, "flex": FLEX_MASKS, "varlen": ["none", "is_causal"], "by hand": ["none"]}[call])
    )
    return Attention(
        call=call,
        mask=mask,
        score_mod=draw(st.sampled_from(SCORE_MODS)) if call == "flex" else "none",
        batch=1 if call == "varlen" else draw(st.sampled_from([1, 1, 2, 3])),
        heads=heads,
        kv_heads=heads if call in ("by hand", "varlen") else kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=head_dim if call == "varlen" else value_dim,
        dtypes=draw(DTYPES),
        layout=draw(st.sampled_from([*LAYOUTS])),
        scale=draw(
            st.sampled_from([None, None, None, 0.2, "tensor", 1 if head_dim <= 16 else 0.1, *([0] if mask == "none" else [])])
        ),
        dropout=draw(st.sampled_from([0.0] * 9 + [0.3])) if call == "sdpa" else 0.0,
        trains=draw(
            st.sampled_from([(True,) * 3] * 8 + [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
        ),
    )


SETTINGS: dict[str, list[Any]] = {
    "schedule": ["auto", "ascending", "descending", "shift", "symmetric", "shift_round_robin", "symmetric_round_robin"],
    "launch": ["grouped", "chained"],
    "template": ["auto", "one_pass", "two_pass"],
    "guarantee": ["run", "device", "batch"],
    "kernel": ["auto", "triton", "gluon"],
    "sm_reserve": [0, 1, 6],
    "on_unsupported": ["fallback", "warn", "error"],
}


@st.composite
def steps(draw: Any) -> Step:
    names = draw(st.lists(st.sampled_from([*SETTINGS]), max_size=2, unique=True))
    several = draw(st.lists(attentions(), min_size=1, max_size=2 if NIGHTLY else 1))  # two take twice as long
    return Step(
        attentions=tuple(several),
        settings={name: draw(st.sampled_from(SETTINGS[name])) for name in names},
        deterministic=draw(st.sampled_from(["strict"] * 4 + ["warn_only", "warn_only", "off"])),
        dynamic=draw(st.sampled_from([False, False, True, None])),
        fullgraph=draw(st.sampled_from([True, True, False])),
        mode=draw(st.sampled_from([None] * 9 + ["reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])),
        autocast=draw(st.sampled_from([None] * 5 + [BF16, FP16])),
        checkpointed=draw(st.sampled_from([False] * 4 + [True])),
        backward=draw(st.sampled_from(["once", "once", "twice", "double"])),
        late=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        sms=draw(st.sampled_from([6, 1, 3, 8])),
    )


@pytest.fixture(scope="module")
def of_all_parts() -> Iterator[Counter[str]]:
    """What became of all examples of a process."""
    counts: Counter[str] = Counter()
    yield counts
    assert counts[FAILED] + counts[WRONG] <= counts.total() / 3, f"too few examples try anything: {counts}"


@pytest.fixture
def outcomes(of_all_parts: Counter[str], record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """What became of the examples, counted for tests/nightly."""
    counts: Counter[str] = Counter()
    yield counts
    for outcome, count in counts.items():
        record_property(outcome, count)
    of_all_parts.update(counts)


@pytest.mark.every_case
@pytest.mark.parametrize("part", range(PARTS))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    suppress_health_check=[*HealthCheck],
    report_multiple_bugs=False,
)
@given(step=steps())
def test_right_or_declined(rewriting, outcomes, part, step):
    outcome = check(step)
    outcomes[outcome] += 1
    note(outcome)
