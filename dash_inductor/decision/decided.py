"""What was decided for one attention, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..schedule.candidates import Candidate
from ..schedule.families import TWO_PASS
from ..templates.tiles import Template, dims_text

UNKNOWN = "?"
GATHERED, RING = "gathered", "ring"  # where keys come from under context parallelism
# Fields of a decision that name its place, say why, are estimates, or stand for others.
NO_BITS = ("source", "module", "graph", "joint", "kinds", "candidates", "reason", "remedy", "predicted_us", "step_ns", "over_ranks")


@dataclass(frozen=True)
class Graph:
    """A compiled graph as this process took it into use, out of a cache or not.

    Attributes:
        number: which of the process's graphs with attention it is, from 0 on: no two have the same.
        compile_id: torch's name of the compilation, as in its logs and traces, such as "0/0"; None outside Dynamo. After
            `torch._dynamo.reset()` torch gives the same names again.
        compiled: what was compiled: the class of the module, such as "GPT", or the name of the function; "" outside Dynamo.
        is_backward: whether it computes gradients of another graph's outputs; an attention's gradients may be in either.
    """

    number: int
    compile_id: str | None
    compiled: str
    is_backward: bool

    def __str__(self) -> str:
        name = f"graph {self.compile_id}" if self.compile_id else "graph"
        of = f" of {self.compiled}" if self.compiled else ""
        return f"{name}{of} ({'backward' if self.is_backward else 'forward'})"


@dataclass(frozen=True)
class Decision:
    """What became of one attention.

    Sizes are ints, or the symbols' names where they are known only at run time; then `family` is "by_size" and `roles`,
    `heads_in_flight` and `predicted_us` are None: the generated code chooses anew for each shape. UNKNOWN is a size, a dtype or a
    mask that the graph of SDPA's math path does not show.

    Attributes:
        op: the stock op; SDPA itself where torch took its math path.
        mask: "full", "causal", "given" (a tensor; declined), "block_mask" (FlexAttention's, or of SDPA under a mask that the graph
            makes), or "varlen" (packed sequences, one batch element; at the level `batch` its lengths are those
            with filled blocks).
        head_dim: of query and key; "192/128" where that of value is another.
        kernel: of one pass, "triton" or "gluon" (`Config.kernel`); two passes are "triton". None if the stock op stays.
        family: the schedule's, or "two_pass": dK/dV and dQ by CTAs of their own, whose launch is "plain".
        as_given: sizes of query, key and value as they are, of another package's op whose order of dimensions is not known; then
            those above are UNKNOWN.
        reason: why the stock op stays, None if it was rewritten.
        remedy: what to change so that it is.
        stock_differs: whether the stock op that stays gives other bits from run to run even in strict mode; None where that cannot
            be told.
        chosen_by_timing: which of its kernels Inductor chooses by timing, so that bits may differ from run to run: "forward",
            "backward" or "forward and backward"; None where none is.
        left_to: the implementation of flash attention in torch's registry to which it is left, as deterministic and faster.
        implementation: whose kernel the op that stays runs: "FA3", "FA4", "CUDNN" or another of torch's registry that takes it, or
            "FA2" and "FA3", whose interface the op of a package has; None for torch's own, and where that is not known.
        segments: of this rank's queries, of which dK and dV are summed apart under context parallelism (`Config.segment`); None
            where they are not.
        turns: launches of the kernel, each of which has some of the heads (docs/cases.md); None where one has all.
        over_ranks: how its keys come from the ranks of context parallelism: GATHERED, or RING, some at a time. None where that is
            not seen.
        sms: those that the schedule may use: the device's, less the reserve (`Config.sm_reserve`).
        roles: A, the CTAs that share a head, see `dash_inductor.schedule`.
        heads_in_flight: G, the heads that are worked on at a time.
        predicted_us: the cost model's time of the backward, in microseconds; an estimate unless its cost file is measured.
        step_ns: the cost model's time of a visited tile, in ns, where the time depends on a mask that is known at run time only.
        workspace_bytes: memory beside inputs and outputs (fp32 dq, delta and lse, table, semaphores; of two passes delta and lse).
        source: the innermost line outside torch that called the attention, "file.py:12", the file named as in a traceback; None
            where torch has noted none. No cache of torch has lines in its keys: out of a warm one comes the line of the call when
            the same graph was compiled first, perhaps before lines moved, or in another file of the same code.
        module: the path, in the outermost module, of the innermost one that called it, such as "model.layers.0.self_attn"; "" in
            the outermost module itself, outside modules, and of hand-written attention. Warm caches as `source`.
        candidates: the schedules among which the cost model chose, in order; () where it had no choice, or makes it at run time.
        dropout: the probability by which its forward dropped; None for none, and of an op that stays.
        reads_in_place: inputs of the graph that our backward reads and PyTorch's would not, too large to be copied: whoever
            writes to one between forward and backward gets PyTorch's error of a tensor that was modified.
        kinds: of its kernels, what is tried before it is used: the text of `first_use.kind.Kind`.
        order: a digest of the order in which dQ's parts are added, and of which CTA adds which; of sizes known at run time the
            digest of the rule, under a mask in blocks of what is the same for all masks. None of two passes, which have no order.
        code: a digest of the sources of its kernels and of what is compiled into them; "" if the stock op stays.
        joint: a digest of the graph in which it was met, before the pass; "" where it was met elsewhere. Ranks with one digest
            compile one graph.
        graph: the compiled graph that holds it; None until one is taken into use, and of a declined call of eager training.
    """

    op: str
    device: str
    dtype: str
    mask: str
    batch: int | str
    heads: int | str
    kv_heads: int | str
    q_len: int | str
    kv_len: int | str
    head_dim: int | str
    reason: str | None = None
    remedy: str | None = None
    stock_differs: bool | None = False
    chosen_by_timing: str | None = None
    left_to: str | None = None
    kernel: str | None = None
    implementation: str | None = None
    as_given: str | None = None
    tile: str | None = None
    family: str | None = None
    roles: int | None = None
    heads_in_flight: int | None = None
    stride: int | None = None
    launch: str | None = None
    segments: int | None = None
    turns: int | None = None
    over_ranks: str | None = None
    sms: int | None = None
    guarantee: str | None = None
    predicted_us: float | None = None
    step_ns: int | None = None
    workspace_bytes: int | str | None = None
    source: str | None = None
    module: str = ""
    candidates: tuple[Candidate, ...] = field(default=(), repr=False)
    dropout: float | None = None
    reads_in_place: tuple[str, ...] = ()
    kinds: tuple[str, ...] = field(default=(), repr=False)
    order: str | None = field(default=None, repr=False)
    code: str = field(default="", repr=False)
    joint: str = field(default="", repr=False)
    graph: Graph | None = None

    @property
    def rewritten(self) -> bool:
        """Whether the attention became our kernels."""
        return self.reason is None

    @property
    def template(self) -> str | None:
        """The kernels that it became, "one_pass", "two_pass", or "by_size"; None if the stock op stays."""
        if not self.rewritten:
            return None
        one_pass = self.family not in (Template.TWO_PASS, Template.BY_SIZE)
        return str(Template.ONE_PASS if one_pass else self.family)

    @property
    def shape(self) -> str:
        """Sizes of the attention in one line."""
        if self.as_given:
            return f"{self.as_given} {self.dtype}"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        return f"B={self.batch} H={heads} S={lengths} D={self.head_dim} {self.dtype}"

    @property
    def place(self) -> str:
        """Where it is called, as a file, a line and a module; "" where nothing is known of that."""
        parts = (f"at {self.source}" if self.source else "", f"in {self.module}" if self.module else "")
        return " ".join(filter(None, parts))

    @property
    def schedule(self) -> str:
        """Family, roles and heads in flight in one line."""
        if self.family == TWO_PASS:  # no sum crosses a CTA
            return f"{TWO_PASS} (deterministic by construction)"
        return f"{self.family}" if self.roles is None else f"{self.family} (A={self.roles}, G={self.heads_in_flight})"

    def text(self) -> str:
        """All but its graph, in one line of ASCII: what is written into graphs and into the code generated for them."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "graph"})

    @staticmethod
    def of_text(text: str) -> Decision:
        """The decision whose text this is."""
        values = json.loads(text)
        tuples = {
            "candidates": tuple(Candidate(*each) for each in values["candidates"]),
            "reads_in_place": tuple(values["reads_in_place"]),
            "kinds": tuple(values["kinds"]),
        }
        return Decision(**values | tuples)

    def __str__(self) -> str:
        drops = "" if self.dropout is None else f", dropout {self.dropout}"
        subject = f"{' '.join(filter(None, (self.op, self.place)))} ({self.shape}, mask {self.mask}{drops})"
        timed = f" (Inductor chooses its {self.chosen_by_timing} by timing)" if self.chosen_by_timing else ""
        if self.reason is not None:
            return f"{subject} keeps the stock kernel{timed}: {self.reason}{f'. Remedy: {self.remedy}' if self.remedy else ''}"
        time = "" if self.predicted_us is None else f", {self.predicted_us:.1f} us predicted"
        time = time if self.step_ns is None else f", predicted by mask: {self.step_ns} ns for each visited tile"
        segments = f", dK and dV in segments: {self.segments}" if self.segments else ""
        turns = f", heads in turns: {self.turns}" if self.turns else ""
        return f"{subject} -> {self.schedule}{segments}{turns}, tile {self.tile}, guarantee {self.guarantee}{time}{timed}"


def size_text(size: object) -> int | str:
    """A size as it stands in a decision: an int, or the text of a symbolic expression."""
    try:
        return int(str(size))
    except ValueError:
        return str(size)


def sizes_in_text(query: Sequence[object], key: Sequence[object], value: Sequence[object]) -> dict[str, Any]:
    """The sizes of a decision, of the shapes of query, key and value."""
    batch, heads, q_len, head_dim = map(size_text, query)
    lengths = {"q_len": q_len, "kv_len": size_text(key[2]), "head_dim": size_text(dims_text(head_dim, size_text(value[3])))}
    return {"batch": batch, "heads": heads, "kv_heads": size_text(key[1]), **lengths}
