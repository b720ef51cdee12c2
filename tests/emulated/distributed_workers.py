"""One rank of tests/emulated/test_distributed.py.

Each case trains one step of a small transformer once for each interleaving, and the rank saves what came of all cases. Ranks find
each other by a file, so that no test takes a port that another process has.
"""

import argparse
import hashlib
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.parallel import DistributedDataParallel

import dash_inductor
from dash_inductor import emulation

TOKENS, WIDTH, HEAD_DIM, BATCH, LENGTH = 32, 64, 16, 2, 96
MICROBATCHES = 2
SMS = 16  # twice the heads in a batch, so that CTAs share heads and have to wait
BUCKET_MB = 0.01  # so small that DDP's optimizer cuts the graph between layers
PYTHON_REDUCER = "python_reducer"
TIMEOUT = 120  # seconds, of a collective

Step = Callable[[], dict[str, Tensor]]
aten = torch.ops.aten
seen: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
fail: Callable[[], None] | None = None


@torch.library.custom_op("distributed_tests::tap", mutates_args=())
def tap(x: Tensor, name: str) -> Tensor:
    """x, which is `seen` with its gradient when that comes by, in a compiled graph too."""
    return x.clone()


@torch.library.custom_op("distributed_tests::see", mutates_args=())
def see(grad: Tensor, x: Tensor, name: str) -> Tensor:
    if fail is not None:
        fail()
    seen[name].append((x.clone(), grad.clone()))
    return grad.clone()


def _remember(ctx, inputs, output):
    x, ctx.name = inputs
    ctx.save_for_backward(x)


tap.register_fake(lambda x, name: torch.empty_like(x))
see.register_fake(lambda grad, x, name: torch.empty_like(grad))
tap.register_autograd(lambda ctx, grad: (see(grad, *ctx.saved_tensors, ctx.name), None), setup_context=_remember)


class Attention(nn.Module):
    """Of as many heads as its projections have: tensor parallel leaves a rank some of them."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        projections = {"query": self.query, "key": self.key, "value": self.value}
        heads = (tap(of(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2), name) for name, of in projections.items())
        out = tap(F.scaled_dot_product_attention(*heads, is_causal=True), "out")
        return self.project(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Two layers; the same weights on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.first, self.second = nn.Embedding(TOKENS, WIDTH), Layer(), Layer()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = self.first, self.second

    def forward(self, x):
        return self.head(self.second(self.first(self.embedding(x))))


def data(shard: int) -> Tensor:
    return torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1 + shard))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def training(model: nn.Module, tokens: Tensor) -> Step:
    def step() -> dict[str, Tensor]:
        model.zero_grad()
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        return gradients_of(model)

    return step


def ddp(*, optimizer: bool | str) -> Step:
    """optimizer: of Dynamo, or "python_reducer", by which compiled autograd compiles the whole backward, all-reduces too."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(BUCKET_MB * 2**20)  # no bucket may be smaller than the first
    model = torch.compile(DistributedDataParallel(Transformer(), bucket_cap_mb=BUCKET_MB), backend="dash")
    step = training(model, data(dist.get_rank()))

    def with_setting() -> dict[str, Tensor]:
        with dynamo_config.patch(optimize_ddp=optimizer, compiled_autograd=optimizer == PYTHON_REDUCER):
            return step()

    return with_setting


def eager() -> Step:
    """DDP without torch.compile."""
    step = training(DistributedDataParallel(Transformer()), data(dist.get_rank()))

    def activated() -> dict[str, Tensor]:
        activate_flash_attention_impl("DASH")
        try:
            return step()
        finally:
            restore_flash_attention_impl()

    return activated


def fsdp2(*, whole: bool) -> Step:
    """Compiled as a whole, or layer by layer."""
    model = Transformer()
    for layer in model.layers:
        if not whole:
            layer.compile(backend="dash", fullgraph=True)
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return training(torch.compile(model, backend="dash") if whole else model, data(dist.get_rank()))


PARALLEL = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
PARALLEL |= {"attention.project": RowwiseParallel(), "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}


def tensor_parallel() -> Step:
    """Each rank has some heads of the same batch."""
    model, mesh = Transformer(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, PARALLEL)
    return training(torch.compile(model, backend="dash"), data(0))


def two_dimensions() -> Step:
    """Tensor parallel over pairs of ranks, FSDP2 over the pairs."""
    model, mesh = Transformer(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    for layer in model.layers:
        parallelize_module(layer, mesh["heads"], PARALLEL)
        layer.compile(backend="dash", fullgraph=True)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return training(model, data(mesh["data"].get_local_rank()))


def pipeline(kind: type) -> Step:
    """Two stages of a layer each; microbatches of one row."""
    model, rank, tokens = Transformer(), dist.get_rank(), data(0)
    part = nn.Sequential(*((model.embedding, model.first) if rank == 0 else (model.second, model.head)))
    rows = BATCH // MICROBATCHES
    numbers = torch.empty(rows, LENGTH, dtype=torch.long, device="meta")
    between, logits = (torch.empty(rows, LENGTH, n, device="meta", requires_grad=True) for n in (WIDTH, TOKENS))
    shapes = {"input_args": numbers, "output_args": between} if rank == 0 else {"input_args": between, "output_args": logits}
    stage = PipelineStage(torch.compile(part, backend="dash"), rank, 2, torch.device("cpu"), **shapes)
    schedule = kind(stage, MICROBATCHES, loss_fn=loss_of)

    def step() -> dict[str, Tensor]:
        part.zero_grad()
        if rank == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:])
        return gradients_of(part)

    return step


def whole_sequence() -> list[Tensor]:
    """query, key, value and grad_out of a sequence of which each rank of a ring has a part."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(1, 2, 4 * LENGTH, HEAD_DIM, generator=generator) for _ in range(4)]


def part_of(x: Tensor, rank: int, ranks: int, *, balanced: bool) -> Tensor:
    """A rank's: one piece, or of twice as many pieces that from the head and that from the tail."""
    if not balanced:
        return x.chunk(ranks, 2)[rank]
    pieces = x.chunk(2 * ranks, 2)
    return torch.cat([pieces[rank], pieces[-1 - rank]], 2)


def context_parallel(*, balanced: bool) -> Step:
    """torch's ring, around the CPU's op, where torch itself puts it around those of a GPU; its backward is ours, called eagerly."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    query, key, value, grad_out = (part_of(x, rank, ranks, balanced=balanced) for x in whole_sequence())

    def backward(**tensors) -> tuple[Tensor, ...]:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(**tensors)
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        seen["ring"].append((*(tensors[name].clone() for name in names), *(x.clone() for x in grads), tensors["is_causal"]))
        return grads

    def step() -> dict[str, Tensor]:
        ring._cp_options.enable_load_balance = balanced
        activate_flash_attention_impl("DASH")
        try:
            forward = aten._scaled_dot_product_flash_attention_for_cpu
            tensors = {"query": query, "key": key, "value": value, "is_causal": True}
            out, logsumexp = ring._templated_ring_attention(group, 2, forward, **tensors)
            saved = {"grad_out": grad_out, "grad_out_name": "grad_out", "out": out, "logsumexp": logsumexp, "dropout_p": 0.0}
            grads = ring._templated_ring_attention_backward(group, 2, backward, **saved, **tensors)
        finally:
            restore_flash_attention_impl()
        return dict(zip(("query", "key", "value"), grads, strict=True))

    return step


CASES: dict[str, Callable[[], Step]] = {
    "ddp": lambda: ddp(optimizer=True),
    "ddp_in_one_graph": lambda: ddp(optimizer=False),
    "ddp_by_python_reducer": lambda: ddp(optimizer=PYTHON_REDUCER),
    "ddp_eager": eager,
    "fsdp2": lambda: fsdp2(whole=False),
    "fsdp2_whole": lambda: fsdp2(whole=True),
    "tensor_parallel": tensor_parallel,
    "pipeline_gpipe": lambda: pipeline(ScheduleGPipe),
    "pipeline_1f1b": lambda: pipeline(Schedule1F1B),
    "context_parallel": lambda: context_parallel(balanced=False),
    "context_parallel_balanced": lambda: context_parallel(balanced=True),
    "two_dimensions": two_dimensions,  # of 4 ranks
}


def digest(tensors: dict[str, Tensor]) -> str:
    """Of every bit."""
    hashed = hashlib.sha256()
    for name, tensor in tensors.items():
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def run(case: str, seeds: list[int]) -> dict:
    """What the test compares."""
    torch._dynamo.reset()
    dash_inductor.clear_decisions()
    runs, step = [], None
    for seed in seeds:
        seen.clear()
        emulation.clear_launches()
        with emulation.emulate(seed, sms=SMS):
            step = step or CASES[case]()
            gradients = {name: grad.clone() for name, grad in step().items()}
        launches = emulation.launches()
        runs.append(
            {
                "gradients": gradients,
                "digest": digest(gradients),
                "seen": dict(seen),
                "orders": [launch.schedule for launch in launches],
                "waits": sum(launch.waits + launch.satisfied for launch in launches),
            }
        )
    decisions = dash_inductor.decisions()
    return {
        "runs": runs,
        "attentions": [(str(decision), decision.rewritten, decision.heads) for decision in decisions],
        "graphs": len({decision.graph.number for decision in decisions if decision.graph}),
    }


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise RuntimeError("rank 1 fails on purpose")


def main() -> None:
    global fail
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--fail", choices=("killed", "raises"), help="how the backward of rank 1 ends")
    parser.add_argument("--without-wait", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    rank, ranks, meeting = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), f"file://{args.folder}/ranks"
    dist.init_process_group("gloo", meeting, timedelta(seconds=TIMEOUT), rank=rank, world_size=ranks)
    if args.fail and rank == 1:
        fail = {"killed": killed, "raises": raises}[args.fail]
    with pytest.MonkeyPatch.context() as patch:
        if args.without_wait:
            import attention

            attention.mutate(patch, "ONE_PASS", "distributed_without_wait", {attention.WAIT: "pass"})
        done = {case: run(case, [seed * ranks + rank for seed in args.seeds]) for case in args.cases}
    torch.save(done, args.folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
