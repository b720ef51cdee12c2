"""Attentions as the command line names them: what is generated for one, its inputs, and what its gradients should be in float64."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.torch_version import TorchVersion

from benchmarks.machine_code.flex import flex_backward
from benchmarks.machine_code.generate import Generated, attention_backward, require_sizes
from dash_inductor import enabled
from dash_inductor.codegen.flex import TORCH_DTYPES, FlexAttention
from dash_inductor.codegen.mods import MASK_MODS, SCORE_MODS
from dash_inductor.dropout import EFFICIENT, FLASH, Dropout, kept
from dash_inductor.first_use.verdict import FENCED
from dash_inductor.lowering import listed, table
from dash_inductor.lowering.failed_waits import failed_waits
from dash_inductor.schedule import parts

from .graphs import flash_backward, masked_backward, varlen_backward
from .launch import Executed, Session, call
from .lower import Program
from .memory import Fault

aten = torch.ops.aten
MASKED = ("masked", "mask", "head-mask", "bias", "learnt", "efficient")
ATTENTIONS = ("sdpa", "varlen", *MASKED)
RANDOM = 2**40 + 7, 2**33 + 4  # seed and offset of a forward that drops
SEQUENCES = 3  # of varlen, and documents
LEAVES_OUT_FENCE = TorchVersion(triton.__version__) < FENCED  # on sm_90, in any kernel whose wgmma reads what cp.async copied


@dataclass
class Case:
    """An attention; the fields are the arguments of `codegen`. `settings` are the project's: kernel, template, schedule, ...

    attention: "sdpa", or a FlexAttention if there is a mask_mod or score_mod; "varlen": varlen_attn of three sequences, of which
    q_len is the sum; "masked": SDPA under `mask` and a padding of keys, another one in each batch, which the graph makes a mask of;
    "mask" and "bias": under a tensor of queries and keys that the graph is given, of bools or of numbers, -inf among them;
    "head-mask": of bools, of each query head its own;
    "learnt": of numbers, whose gradient is wanted too; "efficient": by the same op without a tensor. trained: whether the gradient
    of ALiBi's slopes is wanted. gathered: whether the graph gathers keys, of a process group of one rank. dropout: its p; of "sdpa"
    flash attention drops, of the others the memory-efficient op.
    """

    device: str
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 64
    value_dim: int | None = None
    mask: str = "full"
    attention: str = "sdpa"
    mask_mod: str | None = None
    score_mod: str | None = None
    dtype: str = "bf16"
    dynamic: bool = False
    dropout: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    block: int = 128
    in_bands: bool = False
    trained: bool = False
    gathered: bool = False

    def __post_init__(self) -> None:
        self.kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        self.value_dim = self.value_dim or self.head_dim

    @property
    def is_flex(self) -> bool:
        return bool(self.mask_mod or self.score_mod)


@dataclass
class Result:
    """What came of one execution. Errors are parts of the largest gradient of all three; of slopes, of the sum of sizes."""

    gradients: dict[str, Tensor]
    errors: dict[str, float]
    executed: list[Executed]
    externs: list[str]
    fault: str | None
    seconds: float

    @property
    def ignored(self) -> list[str]:
        """Modifiers that say nothing of values or order."""
        return sorted({name for launch in self.executed for name in launch.program.ignored})

    @property
    def races(self) -> list[dict[str, Any]]:
        return [{"kernel": launch.kernel, **race} for launch in self.executed for race in launch.races]


def unexplained(races: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Races but those that come of the fence that this Triton leaves out."""
    return [race for race in races if not (LEAVES_OUT_FENCE and _is_unfenced(race))]


def _is_unfenced(race: dict[str, Any]) -> bool:
    of_copy = race["at"].startswith("wgmma.") and str(race["earlier"]).startswith("cp.async.")
    return of_copy and race["kind"] == "asynchronous read that no fence.proxy.async passed on"


def same_bits(results: Sequence[Result]) -> bool:
    """Whether all ended, with the same gradients."""
    first = results[0].gradients
    return all(r.fault is None and all(torch.equal(first[name], r.gradients[name]) for name in first) for r in results)


class Prepared:
    """A case with its generated code, inputs and reference; `run` may be called again and again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.constants: dict[str, Tensor] = {}
        with _tables(self.constants), _banded(case.in_bands), enabled(**case.settings):
            self.generated = _generate(case)
        if not any(decision.rewritten for decision in self.generated.decisions):
            reasons = [decision.reason for decision in self.generated.decisions if decision.reason]
            raise ValueError(f"the attention keeps its stock kernel: {'; '.join(reasons) or 'no pass matched it'}")
        self.inputs = _inputs(case)
        self.right, self.sizes, self.out, self.lse = _reference(case, self.inputs)
        self.programs: dict[str, Program] = {}

    def run(
        self,
        seed: int = 0,
        check: bool = True,
        edited: dict[str, Program] | None = None,
        patience: int = 0,
        to_the_end: bool = True,
    ) -> Result:
        """Executes the wrapper.

        edited: by its PTX, what is executed in a kernel's place. to_the_end: else the first race is a fault.
        """
        case = self.case
        total = sum(tensor.numel() * tensor.element_size() for tensor in self.inputs.values())
        session = Session(
            case.device, arena=(1 << 21) + 12 * total, seed=seed, check=check, patience=patience, to_the_end=to_the_end
        )
        session.programs = self.programs | edited if edited else self.programs
        placed = {name: session.memory.put(tensor, name) for name, tensor in self.inputs.items()}
        session.externs |= self._externs(session)
        constants = {name: session.memory.put(tensor, name) for name, tensor in self.constants.items()}
        start, fault, gradients, errors = time.perf_counter(), None, {}, {}
        with session.running():
            try:
                results = call(self.generated.source, self._arguments(placed, session), constants)
            except Fault as error:
                fault = "; ".join([str(error), *failed_waits()])
        if fault is None:
            found = results[-len(self.right) :]
            if case.attention == "varlen":
                found = tuple(tensor.transpose(0, 1)[None] for tensor in found)
            gradients = {name: tensor.clone() for name, tensor in zip(self.right, found, strict=True)}
            off = {name: gradients[name].double() - right for name, right in self.right.items()}
            # NaN as infinity: `max` of several would lose it.
            errors = {name: float(x.abs().max().nan_to_num(math.inf)) / self.sizes[name] for name, x in off.items()}
        return Result(gradients, errors, session.executed, session.externs_used, fault, time.perf_counter() - start)

    @property
    def steps(self) -> int:
        """Pairs of tiles of which a query sees a key, over all query heads: steps of the main loop."""
        tile = next(decision.tile for decision in self.generated.decisions if decision.rewritten)
        rows, columns = map(int, re.findall(r"\d+", str(tile))[:2])
        case = self.case
        visible = _visible(case, self.inputs)
        *masks, q_len, kv_len = visible.shape
        seen = torch.nn.functional.pad(visible.float(), (0, -kv_len % columns, 0, -q_len % rows))
        tiles = seen.view(-1, -(-q_len // rows), rows, -(-kv_len // columns), columns).amax((2, 4))
        return int(tiles.sum()) * case.heads * case.batch // math.prod(masks)

    def _arguments(self, placed: dict[str, Tensor], session: Session) -> list[Tensor]:
        """In the order of the traced function."""
        four = [placed[name] for name in ("query", "key", "value", "grad_out")]
        case = self.case
        put = session.memory.put
        if case.is_flex:
            out = put(_as_stored(self.out, case), "out")
            lse = put((self.lse * math.log2(math.e)).float().contiguous(), "logsumexp")
            return [*four, out, lse, placed["slopes"], placed["documents"], *(placed[f"list{n}"] for n in range(8))]
        arguments = four
        if case.attention == "varlen":
            return [*(x.transpose(1, 2)[0] for x in four), placed["offsets"]]
        if case.attention in MASKED:
            arguments = [*four, placed["padding"]]
        if case.value_dim != case.head_dim:
            arguments = [*four, put(_as_stored(self.out, case), "out"), put(self.lse.float().contiguous(), "logsumexp")]
        first = self.generated.source.split("def call(self, args):")[1].split("= args")[0]
        if first.count(",") + 1 > len(arguments):  # sizes that are symbols come first
            return [*dict.fromkeys((case.q_len, case.kv_len)), *arguments]  # type: ignore[list-item]
        return arguments

    def _externs(self, session: Session) -> dict[Any, Callable[..., Any]]:
        def flash(query: Tensor, *_: Any, **__: Any) -> Any:
            n = query.shape[2]
            random = torch.tensor(RANDOM).view(torch.uint64)
            out = session.memory.put(_as_stored(self.out, self.case), "out")
            lse = session.memory.put(self.lse.float().contiguous(), "logsumexp")
            return out, lse, None, None, n, n, random, random[0], None

        def efficient(query: Tensor, *_: Any, **__: Any) -> Any:
            out, lse = session.memory.put(_as_stored(self.out, self.case), "out"), self.lse.float()
            padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
            return out, session.memory.put(padded, "logsumexp"), *torch.tensor(RANDOM)

        def packed(query: Tensor, *_: Any, **__: Any) -> Any:
            out = session.memory.put(_as_stored(self.out, self.case).transpose(1, 2)[0], "out")
            return out, session.memory.put(self.lse[0].float().contiguous(), "logsumexp"), torch.zeros(2, dtype=torch.uint64)

        return {
            aten._scaled_dot_product_flash_attention.default: flash,
            aten._scaled_dot_product_efficient_attention.default: efficient,
            torch.ops.torch_attn._varlen_attn.default: packed,
        }


@contextmanager
def _tables(constants: dict[str, Tensor]) -> Iterator[None]:
    """Keeps the ints of schedules, which code for a GPU that is not there has as fake tensors."""
    stock = table._constant

    def keep(ints: list[int], device: torch.device) -> Any:
        made = stock(ints, device)
        name = next(name for (name, _device), box in table.V.graph.dash_tables.items() if box is made)
        constants[name] = torch.tensor(ints, dtype=torch.int32)
        return made

    with mock.patch.object(table, "_constant", keep):
        yield


def _generate(case: Case) -> Generated:
    sizes: dict[str, Any] = {x: getattr(case, x) for x in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype")}
    if case.attention != "sdpa":
        if case.is_flex or case.value_dim != case.head_dim:
            raise ValueError(f"--attention {case.attention} takes no --mask-mod, --score-mod and --value-dim")
        shapes, causal = [(case.batch, *shape) for shape in _shapes(case).values()], case.mask == "causal"
        if case.attention in MASKED:
            return masked_backward(case.device, shapes, causal, case.dtype, case.dynamic, case.attention, case.dropout)
        if case.q_len != case.kv_len or case.batch != 1 or case.q_len < SEQUENCES:
            raise ValueError(f"--attention varlen takes one length, of {SEQUENCES} tokens at least, and a batch of 1")
        packed = [(length, heads, dim) for _, heads, length, dim in shapes]
        return varlen_backward(case.device, packed, causal, case.dtype, SEQUENCES, case.dynamic)
    group = dist.distributed_c10d._get_default_group().group_name if case.gathered else None
    if case.dropout or (group and not case.is_flex):
        shapes = [(case.batch, *shape) for shape in _shapes(case).values()]
        return flash_backward(case.device, shapes, case.mask == "causal", case.dtype, case.dynamic, case.dropout, group)
    if case.is_flex:
        if case.q_len != case.kv_len or case.dynamic or case.mask != "full":
            raise ValueError("--mask-mod and --score-mod take one length, known when compiling, and no --mask")
        mods: dict[str, Any] = {"mask_mod": case.mask_mod or "none", "score_mod": case.score_mod or "none"}
        attention = FlexAttention(length=case.q_len, block=case.block, trained=case.trained, **mods, **sizes)
        return flex_backward(case.device, attention, group=group)
    return attention_backward(case.device, q_len=case.q_len, kv_len=case.kv_len, mask=case.mask, dynamic=case.dynamic, **sizes)


def _as_stored(values: Tensor, case: Case) -> Tensor:
    """[B, H, S, D] in the case's dtype, as a view of [B, S, H, D]."""
    return values.transpose(1, 2).contiguous().to(TORCH_DTYPES[case.dtype]).transpose(1, 2)


def _shapes(case: Case) -> dict[str, tuple[int, int, int]]:
    """[H, S, D] by name; ValueError for sizes that no attention has."""
    kv_heads, value_dim = int(case.kv_heads or 0), int(case.value_dim or 0)
    require_sizes([case.q_len, case.kv_len, value_dim], case.batch, case.heads, kv_heads, case.head_dim, case.dtype)
    return {
        "query": (case.heads, case.q_len, case.head_dim),
        "key": (kv_heads, case.kv_len, case.head_dim),
        "value": (kv_heads, case.kv_len, value_dim),
        "grad_out": (case.heads, case.q_len, value_dim),
    }


def _inputs(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: _as_stored(torch.randn(case.batch, *shape, generator=generator), case) for name, shape in _shapes(case).items()}
    documents = (torch.arange(case.q_len) * SEQUENCES // case.q_len).int()
    if case.attention == "varlen":
        made["offsets"] = torch.searchsorted(documents, torch.arange(SEQUENCES + 1).int(), out_int32=True)
    elif case.attention in ("masked", "efficient"):
        lengths = case.kv_len - torch.arange(case.batch) * (case.kv_len // 4) - case.kv_len // 8
        made["padding"] = (torch.arange(case.kv_len) < lengths[:, None]).long()
    elif case.attention in ("mask", "head-mask"):
        masks = (case.batch, 1) if case.attention == "mask" else (1, case.heads)
        made["padding"] = torch.rand(*masks, case.q_len, case.kv_len, generator=generator) > 0.5
        made["padding"][..., case.kv_len // 2 :] = False
    elif case.attention in ("bias", "learnt"):
        bias = torch.randn(1, case.heads, case.q_len, case.kv_len, generator=generator)
        made["padding"] = bias.masked_fill(bias > 1, -math.inf).to(TORCH_DTYPES[case.dtype])
    elif case.is_flex:
        made["slopes"] = torch.tensor([2.0 ** -(8 * (h + 1) / case.heads) for h in range(case.heads)])
        made["documents"] = documents
        made |= {f"list{n}": tensor for n, tensor in enumerate(_block_lists(case, made))}
    return made


@contextmanager
def _banded(always: bool) -> Iterator[None]:
    """With `always`, chains under a block mask are in bands, however few and short they are."""
    if not always:
        yield
        return
    patched = (parts, "LEAST_BANDED"), (listed, "LEAST_STEPS")
    with ExitStack() as stack:
        for module, name in patched:
            stack.enter_context(mock.patch.object(module, name, 1))
        yield


def _visible(case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """[1 or B, 1 or H, S_q, S_k]: whether query m sees key n."""
    m, n = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None, :]
    seen = torch.ones(1, 1, case.q_len, case.kv_len, dtype=torch.bool)
    if case.mask_mod not in (None, "none"):
        zero = torch.tensor(0)
        return seen & MASK_MODS[str(case.mask_mod)](zero, zero, m, n, inputs["documents"])
    if case.mask != "full":
        seen = seen & (m >= n)
    if case.attention == "varlen":
        m, n = (torch.bucketize(x, inputs["offsets"], right=True) for x in (m, n))
        return seen & (m == n)
    if case.attention == "masked":
        return seen & (inputs["padding"] > 0)[:, None, None]
    return seen & inputs["padding"] if case.attention in ("mask", "head-mask") else seen


def _block_lists(case: Case, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The eight lists of a BlockMask: of rows partial, full; of columns partial, full."""
    mod = partial(MASK_MODS[case.mask_mod or "none"], documents=inputs["documents"])
    mask = create_block_mask(mod, None, None, case.q_len, case.kv_len, device="cpu", BLOCK_SIZE=case.block)
    return mask.as_tuple()[2:10]  # type: ignore[return-value]  # behind the lengths; none is missing


def _reference(case: Case, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float], Tensor, Tensor]:
    """dq, dk, dv, and of what is learnt dbias or dslopes; of what size errors are a part; and out and logsumexp of the forward, by
    autograd in float64."""
    leaves = {f"d{name[0]}": inputs[name].double().requires_grad_() for name in ("query", "key", "value")}
    q, k, v = leaves.values()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * case.head_dim**-0.5
    if case.score_mod not in (None, "none"):
        b, h, m, n = (torch.arange(size).view([-1 if i == at else 1 for i in range(4)]) for at, size in enumerate(scores.shape))
        slopes = inputs["slopes"].double().requires_grad_(case.trained)
        leaves |= {"dslopes": slopes} if case.trained else {}
        if case.score_mod == "alibi":
            scores = scores + slopes[h] * (n - m)
        else:
            scores = SCORE_MODS[str(case.score_mod)](scores, b, h, m, n, slopes)
    if case.attention in ("bias", "learnt"):
        bias = inputs["padding"].double()
        if case.attention == "learnt":
            leaves["dbias"] = bias.requires_grad_()
        scores = scores + bias
    before, scores = scores, scores.masked_fill(~_visible(case, inputs), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    if case.dropout:
        dropout = Dropout(case.dropout, FLASH if case.attention == "sdpa" else EFFICIENT)
        weights = weights * kept(dropout, torch.tensor(RANDOM), tuple(weights.shape)) * dropout.scale(TORCH_DTYPES[case.dtype])
    out = weights @ v.repeat_interleave(group, 1)
    *grads, of_scores = torch.autograd.grad(out, [*leaves.values(), before], inputs["grad_out"].double())
    right = dict(zip(leaves, grads, strict=True))
    sizes = dict.fromkeys(right, max(float(x.abs().max()) for name, x in right.items() if name != "dslopes"))
    if case.trained:
        sizes["dslopes"] = float((of_scores * ((n - m) if case.score_mod == "alibi" else 1)).abs().sum((0, 2, 3)).max())
    return right, sizes, out.detach(), lse.detach()
