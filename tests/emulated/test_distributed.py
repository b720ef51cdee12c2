"""Training by several processes: bits do not depend on the interleaving, and are those of one process that has a rank's inputs.

`distributed_workers.py` is what a rank does. One start of its processes runs many cases, for a start takes ten seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import distributed_workers as workers
import pytest
import torch
from attention import attention, compiled, differing, error, gradients
from processes import ranks
from torch import Tensor

from dash_inductor import emulation

WORKER = str(Path(workers.__file__))
SEEDS = (1, 2)
ERROR = 1e-5
SOON = 60.0  # seconds: half of what a collective waits
IN_CI = ["ddp"]
RINGS = ["context_parallel", "context_parallel_balanced"]
OF_FOUR = ["two_dimensions"]
OTHERS = [case for case in workers.CASES if case not in IN_CI + OF_FOUR]
GROUPS = [(2, IN_CI), (2, OTHERS), (4, OF_FOUR)]  # ranks, and the cases of one start
IN_TWO = ("ddp", "ddp_in_one_graph", "tensor_parallel")  # each layer is in a graph of its own, or both are in one
BACKWARDS = 2  # of a rank: of two layers, or of two microbatches

Reports = list[dict[str, Any]]


def each_of(cases: Iterable[str]) -> pytest.MarkDecorator:
    """One test per case; in CI but one of them."""
    marked = [pytest.param(case, marks=[] if case in IN_CI else pytest.mark.nightly) for case in cases]
    return pytest.mark.parametrize("case", marked)


def start(folder: Path, count: int, names: tuple[str, ...], *options: str, seeds: tuple[int, ...] = SEEDS) -> Reports:
    """By rank, what each case left."""
    (folder / "ranks").unlink(missing_ok=True)
    command = [WORKER, str(folder), *names, "--seeds", *map(str, seeds), *options]
    for number, (status, output, _) in enumerate(ranks(count, command, folder)):
        assert status == 0, f"rank {number}: {output}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reports]:
    """Of a case, by rank."""

    @functools.cache
    def of_group(count: int, names: tuple[str, ...]) -> Reports:
        return start(tmp_path_factory.mktemp("ranks"), count, names)

    def of_case(case: str) -> Reports:
        (group,) = (group for group in GROUPS if case in group[1])
        return [report[case] for report in of_group(group[0], tuple(group[1]))]

    return of_case


@each_of(workers.CASES)
def test_same_bits_in_other_interleavings(case, reports):
    for report in reports(case):
        first, second = report["runs"]
        assert first["digest"] == second["digest"] and first["gradients"]
        assert first["orders"] and all(a != b for a, b in zip(first["orders"], second["orders"], strict=True))
        assert first["waits"] and second["waits"]


@each_of(workers.CASES)
def test_every_attention_is_rewritten(case, reports):
    for report in reports(case):
        texts = [text for text, _, _ in report["attentions"]]
        assert all(rewritten for _, rewritten, _ in report["attentions"]), texts
        assert len(texts) >= (2 if case in IN_TWO else 1), texts  # one where layers, or microbatches, share a graph


@each_of(case for case in workers.CASES if case not in RINGS)
@pytest.mark.usefixtures("rewriting")
def test_bits_of_a_single_process(case, reports):
    """The gradients of every attention on each rank are those that this process computes of the same inputs."""
    alone = compiled(attention(causal=True))
    for report in reports(case):
        (queries, keys, values, outs) = (report["runs"][0]["seen"][name] for name in ("query", "key", "value", "out"))
        assert len(queries) == BACKWARDS
        for (query, dq), (key, dk), (value, dv), (_, grad_out) in zip(queries, keys, values, outs, strict=True):
            with emulation.emulate(seed=99, sms=workers.SMS):
                assert differing(gradients(alone, [query, key, value], grad_out), [dq, dk, dv]) == []


def flash_backward(causal: bool) -> Callable[..., tuple[Tensor, ...]]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda *tensors: backward(*tensors, 0.0, causal)


@pytest.mark.nightly
@pytest.mark.usefixtures("rewriting")
@pytest.mark.parametrize("case", RINGS)
def test_a_ring_of_context_parallel(case, reports):
    """Its parts have the bits that this process computes of the same inputs; together they are the whole attention's gradients."""
    found = reports(case)
    for rank, report in enumerate(found):
        parts = report["runs"][0]["seen"]["ring"]
        assert len(parts) == (2 if "balanced" in case or rank == 1 else 1)
        for *tensors, causal in parts:
            with emulation.emulate(seed=99, sms=workers.SMS):
                assert differing(compiled(flash_backward(causal))(*tensors[:6]), tensors[6:]) == []
    *inputs, grad_out = (x.double() for x in workers.whole_sequence())
    expected = gradients(attention(causal=True), inputs, grad_out)
    for rank, report in enumerate(found):
        actual = report["runs"][0]["gradients"]
        for name, whole in zip(actual, expected, strict=True):
            part = workers.part_of(whole, rank, len(found), balanced="balanced" in case)
            assert error(actual[name], part) < ERROR


@pytest.mark.nightly
@pytest.mark.usefixtures("rewriting")
def test_ddp_is_the_mean_of_single_processes(reports):
    """Every gradient of the model, where DDP leaves one graph; its optimizer makes two graphs of an attention each."""
    alone = []
    for rank in range(2):
        with emulation.emulate(seed=99, sms=workers.SMS):
            model = workers.Transformer()
            alone.append(workers.training(compiled(model), workers.data(rank))() and workers.gradients_of(model))
    for one in reports("ddp_in_one_graph"):
        assert one["graphs"] == 1
        actual = one["runs"][0]["gradients"].values()
        for name, grad, first, second in zip(alone[0], actual, alone[0].values(), alone[1].values(), strict=True):
            assert torch.equal(grad, first / 2 + second / 2), name
    assert [report["graphs"] for report in reports("ddp")] == [2, 2]


@pytest.mark.nightly
def test_tensor_parallel_leaves_each_rank_half_the_heads(reports):
    for report in reports("tensor_parallel"):
        assert [heads for *_, heads in report["attentions"]] == [workers.WIDTH // workers.HEAD_DIM // 2] * 2


@pytest.mark.nightly
def test_fresh_processes_and_warm_caches(tmp_path):
    """Ranks share a cache directory, which is empty at the first start."""
    names = ("fsdp2", "tensor_parallel", "pipeline_gpipe")
    cold, warm = (start(tmp_path, 2, names, seeds=(seed,)) for seed in SEEDS)
    for one, other in zip(cold, warm, strict=True):
        for case in names:
            assert one[case]["runs"][0]["digest"] == other[case]["runs"][0]["digest"]
            assert one[case]["attentions"] == other[case]["attentions"]


@pytest.mark.nightly
def test_without_the_wait_bits_differ(tmp_path):
    """The comparison sees a kernel that does not wait for its turn: in the sums of all ranks, and on each rank before them."""
    for report in start(tmp_path, 2, ("ddp",), "--without-wait", seeds=(1, 2, 3, 4)):
        assert len({run["digest"] for run in report["ddp"]["runs"]}) > 1
        queries = [torch.cat([dq for _, dq in run["seen"]["query"]]) for run in report["ddp"]["runs"]]
        assert any(not torch.equal(queries[0], other) for other in queries[1:])


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["killed", "raises"])
@pytest.mark.parametrize("case", ["ddp", "fsdp2", "tensor_parallel", "pipeline_1f1b"])
def test_a_rank_that_dies_ends_the_other(tmp_path, case, how):
    """With an error, and soon: not when the collective's time is up."""
    command = [WORKER, str(tmp_path), case, "--seeds", "1", "--fail", how]
    (survivor, output, waited), (dead, its_output, _) = ranks(2, command, tmp_path)
    assert dead == -9 if how == "killed" else (dead == 1 and "rank 1 fails on purpose" in its_output)
    assert survivor not in (0, -9) and "Error" in output, output
    assert waited < SOON
