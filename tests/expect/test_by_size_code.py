"""A graph of any length holds the kernels of one pass and of two; the generated code launches those of the one or the other."""

import ast
import functools
import re
from typing import Any

import pytest
import torch

from dash_inductor import enabled
from dash_inductor.codegen import Generated, attention_backward, compile_kernel
from dash_inductor.devices import device
from dash_inductor.gates import figures, violated
from dash_inductor.target import Target, TwoPassTile, resolve, tiles_for

HEADS, KV_HEADS = 16, 2
LENGTHS = (1, 100, 640, 2048, 5000, 8192, 40_000)
ONE_PASS, TWO_PASS = 5, 7  # matmuls


@functools.cache
def generated(key: str, head_dim: int, mask: str, **settings: str) -> Generated:
    sizes = {"batch": 1, "heads": HEADS, "kv_heads": KV_HEADS, "q_len": 512, "kv_len": 512}
    with enabled(**settings):
        return attention_backward(key, head_dim=head_dim, mask=mask, dynamic=True, **sizes)


def grids(code: Generated, length: int) -> dict[int, int]:
    """Matmuls of each kernel -> CTAs that the generated code launches of it."""
    scope: dict[str, Any] = {}
    for imported in re.findall(r"^(?:from dash_inductor\.schedule import|import functools).*$", code.source, re.M):
        exec(imported, scope)
    ((decision),) = re.findall(r"^@functools\.lru_cache.*?^    return .*?$", code.source, re.M | re.S)
    exec(decision, scope)
    found = {}
    for name, matmuls in code.matmuls.items():
        (line,) = code.launches[name]
        x, y, z = ast.parse(line, mode="eval").body.args[-3:]
        assert (ast.unparse(y), ast.unparse(z)) == ("1", "1")
        found[matmuls] = eval(re.sub(r"\bs\d+\b", str(length), ast.unparse(x)), scope)
    return found


@pytest.mark.parametrize("settings", [{}, {"launch": "chained"}], ids=["grouped", "chained"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_or_the_other_is_launched(head_dim: int, mask: str, settings: dict[str, str]) -> None:
    """As a graph of that very length would have it."""
    code = generated("h100", head_dim, mask, **settings)
    gpu = device("h100")
    target = Target(gpu.key, gpu.arch, gpu.sms)
    taken = set()
    for length in LENGTHS:
        with enabled(**settings):
            tiles = tiles_for(target, torch.bfloat16, head_dim)
            sizes = {"q_len": length, "kv_len": length, "heads": KV_HEADS, "group": HEADS // KV_HEADS}
            resolved = resolve(target, tiles, **sizes, mask="full" if mask == "full" else "causal_top_left")
        two = isinstance(resolved.tile, TwoPassTile)
        launched = grids(code, length)
        assert set(launched) == {ONE_PASS, TWO_PASS}
        if two:
            assert launched == {ONE_PASS: 0, TWO_PASS: (KV_HEADS + HEADS) * -(-length // 128)}
        else:
            assert launched[ONE_PASS] > 0 and launched[TWO_PASS] == 0
        taken.add(two)
    assert taken == {True, False}


@pytest.mark.parametrize(("key", "head_dim"), [("h100", 64), ("h100", 128), ("a100", 128), ("b200", 64)])
def test_the_gates(key: str, head_dim: int) -> None:
    """Of two passes that write where one would: dq^T at a head dim of 128 on Hopper, dq elsewhere."""
    code, gpu = generated(key, head_dim, "causal"), device(key)
    tiles = tiles_for(Target(gpu.key, gpu.arch, gpu.sms), torch.bfloat16, head_dim)
    assert sorted(code.matmuls.values()) == [ONE_PASS, TWO_PASS]
    for name, matmuls in code.matmuls.items():
        tile = tiles.one_pass if matmuls == ONE_PASS else tiles.two_pass
        assert violated(figures(compile_kernel(code.kernels[name], key), gpu.arch, tile), gpu.arch, tile) == []


@pytest.mark.parametrize("settings", [{"guarantee": "device"}, {"schedule": "descending"}, {"sm_reserve": 4}])
def test_one_pass_alone_where_sizes_must_not_decide(settings: dict[str, Any]) -> None:
    assert list(generated("h100", 64, "causal", **settings).matmuls.values()) == [ONE_PASS]
