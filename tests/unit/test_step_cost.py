"""What deterministic mode costs of a step: figures against their sources, operators by name, and the three ways of measuring."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_inductor import config
from dash_inductor.cli.gpt import GPT
from dash_inductor.cli.main import main
from dash_inductor.decision import Kernel
from dash_inductor.devices import DEVICES
from dash_inductor.devices.stock_kernels import COSTS, NOT_DETERMINISTIC
from dash_inductor.step_cost import BACKWARD, FORWARD, MATMULS, OFF, OTHERS, OURS, STRICT, WAYS, Group, StepCost
from dash_inductor.step_cost.measured import Timed, measured, of_groups
from dash_inductor.step_cost.predicted import PEAK, predicted

KERNEL_TIMES = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "kernel_times.csv"
LENGTH, WIDTH, HEADS, LAYERS, TOKENS, BATCH = 1024, 256, 4, 2, 512, 2


@pytest.fixture(scope="module")
def gpt() -> StepCost:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return predicted(GPT(LENGTH, WIDTH, HEADS, LAYERS, TOKENS).bfloat16(), (tokens, tokens), {}, "h100", matmul_tflops=500)


def group(cost: StepCost, name: str) -> Group:
    (found,) = (each for each in cost.groups if each.name == name)
    return found


def test_matmuls_are_counted(gpt: StepCost) -> None:
    """A forward and two products of its size in the backward, but for the gradient of what no parameter made."""
    rows = BATCH * LENGTH
    forward = LAYERS * 12 * WIDTH**2 + WIDTH * TOKENS
    of_matmuls = group(gpt, MATMULS)
    assert of_matmuls.count == 3 * (LAYERS * 4 + 1)
    assert of_matmuls.tflop == pytest.approx(3 * 2 * rows * forward / 1e12)
    assert of_matmuls.ms == dict.fromkeys(WAYS, pytest.approx(1000 * of_matmuls.tflop / 500))


def test_attention_has_the_times_of_its_prices(gpt: StepCost) -> None:
    """8 of 8 x 8 tiles of 128 are on the diagonal and 28 below it; strict mode takes what its ratio to our Triton kernel says."""
    backward, forward = group(gpt, BACKWARD), group(gpt, FORWARD)
    tflop = LAYERS * 10 * BATCH * HEADS * 36 * 128**2 * 64 / 1e12
    assert backward.count == LAYERS and backward.tflop == pytest.approx(tflop)
    assert backward.ms[OFF] == pytest.approx(1000 * tflop / NOT_DETERMINISTIC[90][64, True].tflops)
    triton = 389 / 1.09 / (COSTS[Kernel.FLASH, True, 64].shared / 100)
    assert backward.ms[STRICT] == pytest.approx(1000 * tflop / triton, rel=0.01)
    assert backward.ms[OURS] == pytest.approx(1000 * tflop / (531 / 1.04), rel=0.01)  # of the Gluon kernel under a causal mask
    assert forward.tflop == pytest.approx(0.4 * tflop)
    assert gpt.ms(OURS) == sum(each.ms[OURS] for each in gpt.groups)
    assert gpt.more_percent(STRICT) == pytest.approx(100 * (gpt.ms(STRICT) / gpt.ms(OFF) - 1))
    assert [(each.op, each.count) for each in gpt.changed] == [("aten._unsafe_masked_index_put_accumulate", 1)]


def test_masks_in_blocks_are_counted_as_causal() -> None:
    x = torch.randn(1, 4, 1024, 64, dtype=torch.bfloat16, requires_grad=True)

    class Documents(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = create_block_mask(lambda b, h, i, j: i // 256 == j // 256, None, None, 1024, 1024, device=x.device)
            return flex_attention(x, x, x, block_mask=mask)

    cost = predicted(Documents(), (x,), {}, "h100")
    backward = group(cost, BACKWARD)
    assert backward.tflop == pytest.approx(10 * 4 * 36 * 128**2 * 64 / 1e12)
    assert backward.ms[OFF] == backward.ms[STRICT]  # FlexAttention is the same in both
    assert any("counted as causal" in note for note in cost.notes)


def test_every_gpu_has_a_peak() -> None:
    assert set(PEAK) == set(DEVICES)


def test_what_is_not_known_has_no_sum() -> None:
    """Of no attention past head dim 128 is it known how fast torch's is; such an attention, declined, has no figure of ours."""

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    cost = predicted(Wide(), (torch.randn(1, 4, 1024, 256, dtype=torch.bfloat16, requires_grad=True),), {}, "h100")
    assert group(cost, BACKWARD).ms[OFF] is None and group(cost, BACKWARD).ms[OURS] is not None
    assert cost.more_percent(OURS) is None and "?" in str(cost)


class Others(nn.Module):
    """One of each kind that strict mode changes, and their neighbours that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3)

    def forward(self, image: Tensor, row: Tensor, index: Tensor) -> Tensor:
        image = F.interpolate(self.convolution(image), scale_factor=2, mode="bilinear")
        image = F.pad(image, (1, 1, 1, 1), mode="reflect")
        long, short, whole = row.cumsum(0), row[:128].cumsum(0), index.cumsum(0)
        added = torch.zeros_like(row).index_add(0, index, row) + torch.zeros_like(row).scatter_add(0, index, row)
        return image.sum() + long.sum() + short.sum() + whole.sum() + added.sum() + torch.empty(3, device=row.device).sum()


def test_operators_that_strict_mode_changes_are_named() -> None:
    # Forward and backward of the long row's; what pads and interpolates becomes index_put.
    inputs = (torch.randn(2, 4, 16, 16), torch.randn(20_000, requires_grad=True), torch.randint(20_000, (20_000,)))
    found = {each.op.removeprefix("aten."): (each.count, each.what) for each in predicted(Others(), inputs, {}, "h100").changed}
    assert found["cumsum"][0] == 2 and "bits may differ" in found["cumsum"][1]
    assert found["convolution"][0] == found["convolution_backward"][0] == 1
    assert found["scatter_add"][0] == 1 and any("index_put" in op for op in found)
    assert any("fill_uninitialized_memory" in what for _, what in found.values())


def test_kernels_as_an_h200_named_them_are_grouped() -> None:
    """All that an attention's backward launches, but for torch's copies of what it gets."""
    with KERNEL_TIMES.open() as file:
        names = {row["kernel"] for row in csv.DictReader(file)}
    attention = {name for name in names if "elementwise" not in name and "memset" not in name.lower()}
    assert len(attention) > 10
    assert {name: set(of_groups({name: 1.0})) for name in attention} == {name: {BACKWARD} for name in attention}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>", FORWARD),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<", BACKWARD),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(", FORWARD),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80(", BACKWARD),
        ("triton_tem_fused_flex_attention_0", FORWARD),
        ("triton_tem_fused_flex_attention_backward_zeros_1", BACKWARD),
        ("triton_dash_preprocess", BACKWARD),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", MATMULS),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", MATMULS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>", MATMULS),
        ("triton_red_fused_native_layer_norm_3", OTHERS),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>", OTHERS),
    ],
)
def test_the_group_of_a_kernel(name: str, expected: str) -> None:
    assert list(of_groups({name: 1.0})) == [expected]


def test_a_step_is_measured_in_three_ways() -> None:
    """Each under its own mode, by a compilation of its own, with gradients; and the caller's mode and gradients are as before."""
    model, seen = nn.Linear(4, 4), []

    def timed(step: Callable[[], None]) -> Timed:
        step()
        assert model.weight.grad is not None
        seen.append((torch.are_deterministic_algorithms_enabled(), config.current().enabled))
        return Timed(1.0 + len(seen), {"nvjet_hsh": 0.5, "triton_poi_fused_add": 0.25 * len(seen)})

    cost = measured(model, (torch.ones(2, 4),), {}, timed)
    assert [mode for mode, _ in seen] == [False, True, True] and [on for _, on in seen[:2]] == [False, False]
    assert not torch.are_deterministic_algorithms_enabled() and model.weight.grad is None
    assert cost.step_ms == {OFF: 2.0, STRICT: 3.0, OURS: 4.0} and cost.more_percent(OURS) == 100
    assert group(cost, MATMULS).ms == dict.fromkeys(WAYS, 0.5) and group(cost, OTHERS).ms[OURS] == 0.75
    assert "measured" in str(cost) and json.loads(cost.to_json())["more_percent"][STRICT] == 50


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match=r"a step of Linear, not deterministic, failed: .*reduction dim"):
        measured(nn.Linear(4, 4), (torch.ones(2, 3),), {}, lambda step: Timed(0.0, dict(step=step())))  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dash_inductor.cli.gpt:example"], "there is no GPU here"),
        (["dash_inductor.cli.gpt:example", "--device", "h900"], "h900"),
        (["dash_inductor.cli.gpt:example", "--matmul-tflops", "5"], "--matmul-tflops goes with --device"),
        (["dash_inductor.cli.gpt:GPT.__len__", "--device", "h100"], "GPT.__len__"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cost", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in line
