"""The backwards of the flash_attn package, rewritten: a stand-in has its ops on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention import assert_right, compiled, gradients, in_interleavings, rewritten
from flash_attn_stand_in import ANOTHER, HUB_2, HUB_3, WITHOUT_FORWARD, attend, attend_3, ranges, separated
from tensors import BF16, FP16, FP32, normal
from torch import Tensor
from torch._dynamo import config as dynamo_config

import dash_inductor
from dash_inductor import decisions
from dash_inductor.emulation import emulate
from dash_inductor.rewrite import probe

NAME, VARLEN_NAME = (f"flash_attn._flash_attn_{kind}backward.default" for kind in ("", "varlen_"))


OFFSETS = torch.tensor([0, 24, 25, 60], dtype=torch.int32)


def separate(length: int = 40, kv_heads: int = 2, kv_len: int = 0, dtype: torch.dtype = FP32) -> list[Tensor]:
    sizes = ((length, 4), (kv_len or length, kv_heads), (kv_len or length, kv_heads))
    return [normal(2, n, heads, 16, seed=seed).to(dtype) for seed, (n, heads) in enumerate(sizes)]


def kv_packed(dtype: torch.dtype = FP32) -> list[Tensor]:
    return [normal(1, 40, 4, 16).to(dtype), normal(1, 72, 2, 2, 16, seed=1).to(dtype)]


def qkv_packed(dtype: torch.dtype = FP32) -> list[Tensor]:
    return [normal(2, 40, 3, 2, 16).to(dtype)]


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (separate(kv_heads=4), {}),
        (separate(kv_len=72, dtype=BF16), {}),
        (separate(72), {"causal": True, "scale": 0.3, "deterministic": True}),
        (kv_packed(FP16), {}),
        (qkv_packed(), {"causal": True}),
        (qkv_packed(BF16), {}),
    ],
)
def test_gradients(rewriting: None, inputs: list[Tensor], options: dict[str, Any]) -> None:
    """Right, and the same in three interleavings."""
    found = in_interleavings(lambda *x: attend(*x, **options), inputs)
    assert rewritten() == 1 and decisions()[-1].op == NAME and decisions()[-1].mask == ("causal" if "causal" in options else "full")
    assert_right(found, lambda *x: by_sdpa(*x, **options), inputs)


def by_sdpa(*tensors: Tensor, causal: bool = False, scale: float | None = None, deterministic: bool = False) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in separated(tensors))
    options = {"is_causal": causal, "scale": scale, "enable_gqa": True}
    return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)  # type: ignore[arg-type]


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def by_eager(*tensors: Tensor, causal: bool = False, window: tuple[int, int] = (-1, -1), **options: Any) -> Tensor:
    """As flash_attn documents a soft-cap and ALiBi, whose bias of a query's place does not matter."""
    query, key, value = (x.transpose(1, 2) for x in separated(tensors))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    place, n = torch.arange(query.shape[2])[:, None] + (key.shape[2] - query.shape[2]), torch.arange(key.shape[2])
    scores, cap = query @ key.mT / 4, options.get("softcap", 0.0)
    scores = cap * (scores / cap).tanh() if cap else scores
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes[..., None, None].to(scores.dtype) * (place - n).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = ((n > place + right) if right >= 0 else (n < 0)) | ((n < place - left) if left >= 0 else (n < 0))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("inputs", "options", "mask"),
    [
        (separate(), {"softcap": 2.0}, "full"),
        (separate(72), {"softcap": 0.7, "causal": True}, "causal"),
        (separate(kv_len=72), {"alibi_slopes": SLOPES}, "full"),
        (separate(72), {"alibi_slopes": torch.stack([SLOPES, SLOPES / 2]), "causal": True}, "causal"),
        (separate(40, kv_len=72), {"alibi_slopes": SLOPES, "causal": True}, "block_mask"),
        (separate(), {"alibi_slopes": SLOPES, "window": (9, 0), "softcap": 1.5}, "block_mask"),
        (qkv_packed(BF16), {"alibi_slopes": SLOPES[:2], "softcap": 3.0, "window": (60, 0)}, "block_mask"),
        pytest.param(separate(kv_len=72), {"causal": True}, "block_mask", marks=pytest.mark.quick),
        (separate(72, kv_len=40), {"causal": True}, "block_mask"),
        (separate(kv_len=72), {"window": (9, 5)}, "block_mask"),
        (qkv_packed(), {"causal": True, "window": (9, -1)}, "block_mask"),
        (separate(), {"window": (-1, 3)}, "block_mask"),
    ],
)
def test_windows_and_functions_of_scores(rewriting: None, inputs: list[Tensor], options: dict[str, Any], mask: str) -> None:
    """Right, and the same in three interleavings. Of lengths that differ the last query is in line with the last key."""
    found = in_interleavings(lambda *x: attend(*x, **options), inputs)
    assert rewritten() == 1 and decisions()[-1].op == NAME and decisions()[-1].mask == mask
    assert_right(found, lambda *x: by_eager(*x, **options), inputs)


KINDS = ["soft-cap", "causal soft-cap", "alibi", "causal alibi", "soft-cap alibi", "causal soft-cap alibi"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_forward_makes_of_scores_is_probed(kind: str) -> None:
    """The stand-in does what flash_attn's sources say; one whose causal ALiBi is the documented one has another logsumexp."""
    forward = probe.forward_asked(NAME)
    assert forward
    assert probe.probe(forward, kind, FP32, torch.device("cpu"), padded=False) is None

    def without(*args: Any, **options: Any) -> Any:
        return forward(*args)

    assert "logsumexp is off by" in str(probe.probe(without, kind, FP32, torch.device("cpu"), padded=False))
    if kind != "causal alibi":
        return

    def as_documented(*args: Any, alibi_slopes: Tensor) -> Any:
        out, lse = forward(*args, alibi_slopes=alibi_slopes)
        return out, lse - alibi_slopes[:, None, None] * torch.arange(lse.shape[2])[:, None]

    assert "logsumexp is off by" in str(probe.probe(as_documented, kind, FP32, torch.device("cpu"), padded=False))


def test_gradients_that_are_used_otherwise(rewriting: None) -> None:
    """A packed gradient goes on through a layer, and one of separate ones is not wanted."""
    weight = normal(32, 96, seed=3) / 32**0.5  # scores of a size that rounding does not decide

    def layer(x: Tensor) -> Tensor:
        return attend((x @ weight.to(x.dtype)).unflatten(-1, (3, 2, 16)), causal=True)

    def without_value(query: Tensor, key: Tensor) -> Tensor:
        return attend(query, key, key.detach() * 2)

    for function, inputs in ((layer, [normal(1, 40, 32)]), (without_value, separate()[:2])):
        with emulate():
            actual = gradients(compiled(function), inputs)
        assert_right(actual, function, inputs)
    assert rewritten() == 2


STAYS: list[tuple[Callable[..., Tensor], list[Tensor], str]] = [
    (lambda *x: attend(*x, window=(8, -1)), separate(72, kv_len=40), "a window to the left alone, and more queries than keys"),
    (lambda *x: attend(*x, dropout_p=0.1), separate(), "dropout_p=0.1: its random bits have a layout that only the stock op knows"),
]


@pytest.mark.parametrize(("function", "inputs", "reason"), STAYS, ids=[reason for *_, reason in STAYS])
@pytest.mark.filterwarnings("ignore:dash_inductor")
def test_what_stays(rewriting: None, function: Callable[..., Tensor], inputs: list[Tensor], reason: str) -> None:
    """The stand-in computes what it would in eager training; the decision has both why, and that it is not deterministic."""
    with emulate():
        actual = gradients(compiled(function), inputs)
    decision = decisions()[-1]
    assert rewritten() == 0 and decision.op == NAME and decision.stock_differs
    assert reason in (decision.reason or "") and "deterministic=False" in (decision.reason or "") and decision.remedy
    assert all(map(torch.equal, actual, gradients(function, inputs)))


@pytest.mark.filterwarnings("ignore:dash_inductor")
@pytest.mark.parametrize(
    ("namespace", "sequences", "reason"),
    [
        (ANOTHER, (), "its arguments are those of neither flash_attn 2.8 nor FlashAttention 3"),
        (ANOTHER, (OFFSETS, OFFSETS, 35, 35), "its arguments are those of neither flash_attn 2.8 nor FlashAttention 3"),
        (WITHOUT_FORWARD, (), "to which no forward belongs by its name"),
    ],
)
def test_another_interface_stays(rewriting: None, namespace: str, sequences: tuple[Any, ...], reason: str) -> None:
    inputs = [normal(60, 3, 2, 16)] if sequences else separate()
    with emulate():
        gradients(compiled(lambda *x: attend(*x, namespace=namespace, sequences=sequences)), inputs)
    decision = decisions()[-1]
    assert rewritten() == 0 and reason in (decision.reason or "") and decision.op.startswith(namespace) and decision.remedy


@pytest.mark.parametrize(
    ("namespace", "function", "inputs", "options"),
    [
        (HUB_2, attend, separate(kv_len=72), {"causal": True, "softcap": 2.0}),
        (HUB_2, attend, [normal(60, 3, 2, 16)], {"sequences": (OFFSETS, OFFSETS, 35, 35)}),
        (HUB_3, attend_3, separate(), {"causal": True}),
    ],
)
def test_the_kernels_hub(
    rewriting: None, namespace: str, function: Callable[..., Tensor], inputs: list[Tensor], options: dict[str, Any]
) -> None:
    """Its ops, whose namespaces end in a hash, get the bits that the package's get."""
    found = []
    with emulate():
        for others in ({}, {"namespace": namespace}):
            found.append(gradients(compiled(partial(function, **options, **others)), inputs))
            decision = decisions()[-1]
            assert decision.rewritten and decision.op.startswith(others.get("namespace", "flash_attn"))
    assert rewritten() == 2 and all(map(torch.equal, *found))


def test_it_is_told_as_rewritten(as_installed: None) -> None:
    """Where deterministic mode would not see it, "error" goes on: nothing is left to raise for."""
    with dash_inductor.enabled(on_unsupported="error"):
        gradients(compiled(attend), separate())
    assert decisions()[-1].rewritten


def in_base_2(stock: Callable[..., Any], *args: Any) -> Any:
    out, lse, *rest = stock(*args)
    return out, lse * 1.4427, *rest


def test_the_forward_is_probed(rewriting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asked again by the code that is generated."""
    probe._probed_once.cache_clear()
    asked: list[tuple[str, ...]] = []
    stock = probe._probed_once.__wrapped__
    monkeypatch.setattr(probe, "_probed_once", lambda *question: asked.append(question) or stock(*question))
    with emulate():
        gradients(compiled(partial(attend, causal=True)), separate())
        assert set(asked) == {(NAME, "causal", "float32", "cpu", None)} and len(asked) == 2 and rewritten() == 1
        monkeypatch.setitem(probe.OF_PACKAGES, "FA2", partial(in_base_2, probe.OF_PACKAGES["FA2"]))
        with pytest.warns(UserWarning, match="logsumexp is in base 2"), dash_inductor.enabled(on_unsupported="warn"):
            gradients(compiled(attend), separate())
    assert rewritten() == 1 and "logsumexp is in base 2" in (decisions()[-1].reason or "")


OF_KEYS = torch.tensor([0, 31, 40, 80], dtype=torch.int32)


def by_sequences(*tensors: Tensor, sequences: tuple[Any, ...], window: tuple[int, int] = (-1, -1), **options: Any) -> Tensor:
    """SDPA of each sequence; the last query is in line with the last key."""
    query, key, value = separated(tensors, True)
    outs, modified = [], {"softcap", "alibi_slopes"} & options.keys()
    for of_q, of_k in ranges(*sequences[:2]):
        if modified:
            outs.append(by_eager(*(x[None] for x in (query[of_q], key[of_k], value[of_k])), window=window, **options)[0])
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (query[of_q], key[of_k], value[of_k]))
        place, n = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]), torch.arange(k.shape[2])
        left, right = window[0], 0 if options.get("causal") else window[1]
        seen = ((n <= place + right) if right >= 0 else (n >= 0)) & ((n >= place - left) if left >= 0 else (n >= 0))
        seen = seen.expand(q.shape[2], k.shape[2])
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("inputs", "keys", "options"),
    [
        ([normal(60, 3, 2, 16)], OFFSETS, {"causal": True}),
        ([normal(60, 4, 16), normal(80, 2, 2, 16, seed=1)], OF_KEYS, {}),
        ([normal(60, 2, 16, seed=n, dtype=BF16) for n in range(3)], OFFSETS, {"causal": True, "window": (9, 0)}),
        ([normal(60, 3, 2, 16)], OFFSETS, {"causal": True, "softcap": 1.5, "alibi_slopes": SLOPES[:2]}),
        ([normal(60, 4, 16), normal(80, 2, 2, 16, seed=1)], OF_KEYS, {"alibi_slopes": SLOPES}),
    ],
)
def test_packed_sequences(rewriting: None, inputs: list[Tensor], keys: Tensor, options: dict[str, Any]) -> None:
    """Right, and the same in three interleavings."""
    given: dict[str, Any] = {"sequences": (OFFSETS, keys, 35, 40), **options}
    found = in_interleavings(lambda *x: attend(*x, **given), inputs)
    assert rewritten() == 1
    assert (decisions()[-1].op, decisions()[-1].mask) == (VARLEN_NAME, "varlen")
    assert_right(found, lambda *x: by_sequences(*x, **given), inputs)


@pytest.mark.filterwarnings("ignore:dash_inductor")
@pytest.mark.parametrize(
    ("option", "reason"),
    [({"dropout_p": 0.1}, "dropout_p=0.1"), ({"alibi_slopes": torch.ones(3, 2)}, "ALiBi with slopes of each packed sequence")],
)
def test_packed_sequences_that_stay(rewriting: None, option: dict[str, Any], reason: str) -> None:
    with emulate():
        gradients(compiled(lambda x: attend(x, sequences=(OFFSETS, OFFSETS, 35, 35), **option)), [normal(60, 3, 2, 16)])
    assert rewritten() == 0 and reason in (decisions()[-1].reason or "") and decisions()[-1].stock_differs


def of_read_lengths(x: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    """Lengths are elements of a tensor, as transformers has them."""
    return attend(x, sequences=(OFFSETS, OFFSETS, *(int(length) for length in lengths)), **options)


@pytest.mark.filterwarnings("ignore:dash_inductor")
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"causal": True, "softcap": 2.0}, None), ({"window": (9, -1)}, "lengths that are read from a tensor, and a window")],
)
def test_lengths_that_are_read(rewriting: None, options: dict[str, Any], reason: str | None) -> None:
    """Nothing but an odd window depends on them."""
    lengths = torch.tensor([35, 35])
    with emulate(), dynamo_config.patch(capture_scalar_outputs=True):
        gradients(compiled(lambda x: of_read_lengths(x, lengths, **options)), [normal(60, 3, 2, 16)])
    assert rewritten() == (reason is None) and (reason or "None") in str(decisions()[-1].reason)


OF_3 = "flash_attn_3._flash_attn_backward.default"


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (separate(40), {"causal": True}),
        (separate(40, kv_len=72, dtype=BF16), {}),
        ([normal(60, 2, 16, seed=n) for n in range(3)], {"causal": True, "sequences": (OFFSETS, OFFSETS, 35, 35)}),
        (separate(), {"window": (8, 0)}),
        (separate(), {"softcap": 1.5, "causal": True}),
    ],
)
def test_flash_attention_3(rewriting: None, inputs: list[Tensor], options: dict[str, Any]) -> None:
    found = in_interleavings(lambda *x: attend_3(*x, **options), inputs)
    assert rewritten() == 1 and decisions()[-1].op == OF_3
    reference = by_sequences if "sequences" in options else by_eager if {"window", "softcap"} & options.keys() else by_sdpa
    assert_right(found, lambda *x: reference(*x, **options), inputs)


@pytest.mark.filterwarnings("ignore:dash_inductor")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"forwards": {"qv": torch.ones(2, 40, 4, 8)}}, "qv of flash_attn"),
        ({"forwards": {"attention_chunk": 8}}, "attention_chunk of flash_attn"),
        ({"forwards": {"q_descale": torch.ones(2, 4)}}, "a scale of 8-bit tensors"),
    ],
)
def test_flash_attention_3_that_stays(rewriting: None, options: dict[str, Any], reason: str) -> None:
    with emulate():
        gradients(compiled(lambda *x: attend_3(*x, **options)), separate())
    assert rewritten() == 0 and reason in (decisions()[-1].reason or "") and decisions()[-1].op == OF_3


PACKAGE = "flash-attn==2.8.3"
SCHEMAS = """
import json, sys, types, torch
sys.modules["flash_attn_2_cuda"] = types.ModuleType("flash_attn_2_cuda")
text = sys.stdin.read().replace('device_types="cuda"', 'device_types="cpu"')
exec(compile(text, "flash_attn_interface.py", "exec"), {"__name__": "flash_attn_interface"})
kinds = ("forward", "backward", "varlen_forward", "varlen_backward")
print(json.dumps({kind: str(getattr(torch.ops.flash_attn, f"_flash_attn_{kind}").default._schema) for kind in kinds}))
"""


@pytest.mark.nightly
def test_the_stand_in_has_the_schemas_of_the_package(tmp_path: Path) -> None:
    """Of the published source archive."""
    download = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest"]
    without_compiling = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([sys.executable, "-m", "pip", *download, tmp_path, PACKAGE], check=True, env=without_compiling)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        name = next(name for name in archive.getnames() if name.endswith("/flash_attn/flash_attn_interface.py"))
        file = archive.extractfile(name)
        assert file
        text = file.read().decode()
    printed = subprocess.run([sys.executable, "-c", SCHEMAS], input=text, capture_output=True, text=True, check=True).stdout
    for kind, schema in json.loads(printed).items():
        assert str(getattr(torch.ops.flash_attn, f"_flash_attn_{kind}").default._schema) == schema
