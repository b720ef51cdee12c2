"""FlexAttentions that keep the stock kernel say why, and stay right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention import FP32_ERROR, SeenError, compiled, error, gradients, rewritten
from flex import causal, softcap
from tensors import FP32, normal, qkv
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_inductor import Decision, UnsupportedAttentionError, decisions, enabled, problem
from dash_inductor.config import Config
from dash_inductor.devices.target import Target
from dash_inductor.emulation import emulate
from dash_inductor.op import FLEX_BACKWARD, MARK, NOTE, captured
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.rewrite.declined import noted

pytestmark = pytest.mark.usefixtures("rewriting")

LENGTH = 64
INPUTS = qkv(1, 2, LENGTH, LENGTH, 16)[:3]


def reason(function: Callable[..., Tensor], inputs: Sequence[Tensor] = INPUTS, **settings: Any) -> str | None:
    """What the pass says of the one attention of the function, which is not lowered; None where it is rewritten."""
    found: list[list[Decision]] = []

    def look(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:  # of the joint graph, or before that of its subgraphs
            if node.target is FLEX_BACKWARD:
                found.append([noted(note) for note in graph.nodes if note.target is NOTE])
                assert len(found[-1]) == (MARK not in node.meta)
                raise SeenError

    ended = pytest.raises(BackendCompilerFailed, match="SeenError")
    with enabled(**settings), emulate(), inductor_config.patch(joint_custom_post_pass=look), ended:
        compiled(function)(*(x.detach().requires_grad_() for x in inputs))
    assert all(decision.remedy for decision in found[0])
    learns = len(inputs) > 3
    assert all(decision.stock_differs == learns for decision in found[0] if "BACKEND" not in str(decision.reason))
    return found[0][0].reason if found[0] else None


def attend(**keywords: Any) -> Callable[..., Tensor]:
    return lambda query, key, value: flex_attention(query, key, value, **keywords)


def blocks(size: int | tuple[int, int]) -> Any:
    return create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=size)


def scaled(query: Tensor, key: Tensor, value: Tensor, gain: Tensor) -> Tensor:
    """By the sign of a score."""
    return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score * gain[(score > 0).int()])


def scaled_by_head(query: Tensor, key: Tensor, value: Tensor, gain: Tensor) -> Tensor:
    return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score * gain[h])


def doubled(query: Tensor, key: Tensor, value: Tensor, gain: Tensor) -> Tensor:
    """All of the tensor, not an element."""
    return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score * (2 * gain)[h])


def rows(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score + table[h].sum())


def by_logarithm(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    """T5's buckets, as a score_mod may compute them."""
    return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score + table[torch.log2(m - n + 128.0).int()])


def by_read_buckets(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    """The same, computed before; of floats, which are whole numbers."""
    buckets = torch.log2(torch.arange(-LENGTH, LENGTH) + 128.0).floor()
    return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score + table[buckets[m - n + LENGTH].int()])


def of(head_dim: int = 16, value_dim: int | None = None, dtype: torch.dtype = FP32) -> list[Tensor]:
    query, key, _ = qkv(1, 2, LENGTH, LENGTH, head_dim, dtype=dtype)[:3]
    return [query, key, normal(1, 2, LENGTH, value_dim or head_dim, dtype=dtype, seed=2)]


GAIN = [*INPUTS, normal(2, seed=3)]
AT_A_SCORE = "score_mod reads a tensor that requires a gradient at an index made of the score"
MULTIPLE = "is no multiple of the tile's 16 x 32"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("function", "inputs", "settings", "expected"),
    [
        (attend(score_mod=softcap, block_mask=blocks(32)), INPUTS, {}, None),
        (scaled, GAIN, {}, AT_A_SCORE),
        (scaled_by_head, GAIN, {}, None),
        (by_logarithm, [*INPUTS, normal(9, seed=3)], {}, "score_mod computes an index in floats, by aten.log2"),
        (by_read_buckets, [*INPUTS, normal(9, seed=3)], {}, None),
        (doubled, GAIN, {}, "aten.mul.Tensor in the gradient of a tensor that score_mod captures"),
        (rows, [*INPUTS, normal(2, 8, seed=3)], {}, "score_mod reads rows of a captured tensor that requires a gradient"),
        (scaled_by_head, [*of(272), GAIN[3]], {}, "head dim 272 is outside 1..256"),
        (attend(kernel_options={"BACKEND": "FLASH"}), INPUTS, {}, "BACKEND='FLASH' is asked for"),
        (attend(kernel_options={"BACKEND": "TRITON_DECODE"}), INPUTS, {}, "BACKEND='TRITON_DECODE' is asked for"),
        (attend(kernel_options={"BACKEND": "TRITON"}), INPUTS, {}, None),
        (attend(block_mask=blocks(16)), INPUTS, {}, f"BLOCK_SIZE (16, 16) {MULTIPLE}"),
        (attend(block_mask=blocks((8, 64))), INPUTS, {}, f"BLOCK_SIZE (8, 64) {MULTIPLE}"),
        (attend(block_mask=blocks((16, 32))), INPUTS, {}, None),
        (attend(), of(16, 32), {}, None),
        (attend(), of(16, 144), {}, None),
        (attend(), of(128), {}, None),
        (
            attend(),
            of(192),
            {"template": "one_pass"},
            "head dim 192 is more than the 128 of one pass, which template='one_pass' asks",
        ),
        (attend(), of(272), {}, "head dim 272 is outside 1..256"),
        (attend(), of(8), {}, None),
        (attend(), of(dtype=torch.float64), {}, "dtype torch.float64 is not one of bf16, fp16, fp32"),
        (
            attend(block_mask=blocks(32)),
            INPUTS,
            {"template": "two_pass"},
            "BLOCK_SIZE (32, 32) is no multiple of the tile's 32 x 64",
        ),
        (attend(), INPUTS, {"kernel": "gluon"}, "the Gluon kernel is made for sm_90, not emulated"),
        (
            attend(block_mask=blocks(32)),
            INPUTS,
            {"schedule": "shift"},
            "schedule='shift' takes no BlockMask: its KV tiles are added",
        ),
        (attend(block_mask=blocks(32)), INPUTS, {"schedule": "descending"}, None),
        (attend(), INPUTS, {"schedule": "symmetric"}, "family 'symmetric' serves causal masks only"),
    ],
)
def test_reasons(function, inputs, settings, expected):
    said = reason(function, inputs, **settings)
    assert said == expected if expected is None else (said or "").startswith(expected)


def test_gradients_of_captured_tensors_have_a_size(monkeypatch):
    """Of the elements that are stored, and of the places that are sorted by an index."""

    def by_distance(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(query, key, value, score_mod=lambda score, b, h, m, n: score + bias[m - n + LENGTH])

    inputs = [*INPUTS, normal(2 * LENGTH, seed=3)]
    elements = 2 * LENGTH**2
    monkeypatch.setattr(captured, "MOST_ELEMENTS", elements)
    assert reason(by_distance, inputs) is None
    monkeypatch.setattr(captured, "MOST_ELEMENTS", elements - 1)
    assert (
        reason(by_distance, inputs)
        == f"the gradient of what is added to scores takes {elements} elements of memory, more than {elements - 1}"
    )
    monkeypatch.setattr(captured, "MOST_ELEMENTS", elements)
    monkeypatch.setattr(captured, "MOST_SORTED", LENGTH**2 - 1)
    assert reason(scaled_by_head, GAIN) is None
    expected = f"{LENGTH**2} places are sorted by the index of a captured tensor, more than {LENGTH**2 - 1}"
    assert reason(by_distance, inputs) == expected


def near(by_head: bool) -> Callable[..., Tensor]:
    """A mask of each head, or of all."""
    return lambda b, h, m, n: (m >= n) & (m - n <= 16 * (h + 1 if by_head else 1))


def test_blocks_of_all_heads_are_counted(monkeypatch):
    """Four of a mask: of SDPA, whose mask the pass reads, as of a BlockMask. All heads may have one mask in common."""
    monkeypatch.setattr(problem, "MOST_BLOCKS", 7)
    rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    heads = torch.arange(2)[None, :, None, None]
    expected = "2 masks of batch elements and heads have 8 blocks of 32 x 32 in all, more than 7"
    for by_head, said in ((False, None), (True, expected)):
        mask = create_block_mask(near(by_head), None, 2 if by_head else None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
        assert reason(attend(block_mask=mask)) == said

        def masked(query: Tensor, key: Tensor, value: Tensor, by_head: bool = by_head) -> Tensor:
            seen = near(by_head)(None, heads, rows, keys)
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)

        with emulate():
            gradients(compiled(masked), INPUTS, INPUTS[0])
        assert (decisions()[-1].mask, decisions()[-1].reason) == ("block_mask" if said is None else decisions()[-1].mask, said)


@pytest.mark.parametrize("name", ["cpp_wrapper", "benchmark_kernel", "triton.autotune_at_compile_time"])
def test_settings_of_inductor(name):
    with inductor_config.patch({name: True}):
        assert reason(attend()) == f"torch._inductor.config.{name} is on"


def test_fp32_on_a_gpu():
    """No tile of a GPU takes it."""
    problem = Problem("block_mask", 1, 2, 2, 256, 256, 64, "fp32", block_size=(128, 128), function_ops=1)
    with pytest.raises(ValueError, match="dtype fp32 is not one of bf16, fp16"):
        resolve(problem, Config(), Target("h100", 90, 132))


def in_another_line(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flex_attention(query, key, value.repeat(1, 1, 1, 18))[..., :16]


def three(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two of which keep the stock kernel."""
    wide = value.repeat(1, 1, 1, 17)
    return flex_attention(query, key, value) + in_another_line(query, key, value) + flex_attention(query, key, wide)[..., :16]


def test_one_graph_with_stock_kernels():
    """decisions() has each of them; all gradients are right."""
    with emulate():
        actual = gradients(compiled(three), INPUTS)
    assert (rewritten(), counters["inductor"]["dash_declined"]) == (1, 2)
    lines, first = inspect.getsourcelines(three)
    assert [decision.source for decision in decisions()[-3:]].count(f"{__file__}:{first + len(lines) - 1}") == 2
    assert f"{__file__}:{inspect.getsourcelines(in_another_line)[1] + 1}" in [decision.source for decision in decisions()[-3:]]
    reasons = sorted(str(decision.reason) for decision in decisions()[-3:])
    assert reasons[0] == "None" and all(
        text.startswith(f"head dim 16/{16 * n} is outside") for n, text in enumerate(reasons[1:], 17)
    )

    def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT / 4
        return 3 * scores.softmax(-1) @ value

    expected = gradients(reference, [x.double() for x in INPUTS])
    assert max(error(a, e) for a, e in zip(actual, expected, strict=True)) < FP32_ERROR


def test_it_can_be_said_louder():
    """A warning; an error, with the line of the attention."""
    with pytest.warns(UserWarning, match="leaves flex_attention_backward to the stock kernel: score_mod reads a tensor"):
        reason(scaled, GAIN, on_unsupported="warn")
    with enabled(on_unsupported="error"), emulate(), pytest.raises(BackendCompilerFailed, match="made of the score") as caught:
        compiled(scaled)(*(x.detach().requires_grad_() for x in GAIN))
    assert isinstance(caught.value.inner_exception, UnsupportedAttentionError)
    assert "score_mod=lambda score, b, h, m, n: score * gain[(score > 0).int()]" in str(caught.value)
