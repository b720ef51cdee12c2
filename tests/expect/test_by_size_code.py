"""A graph of any length holds the kernels of one pass and of two; the generated code launches those of the one or the other."""

import ast
import re
from functools import partial
from typing import Any

import kernels
import pytest

from benchmarks.machine_code.generate import Generated
from dash_inductor import enabled
from dash_inductor.config import current
from dash_inductor.devices import device
from dash_inductor.devices.target import Target
from dash_inductor.problem import Problem
from dash_inductor.resolve import resolve
from dash_inductor.templates.tiles import Template, two_pass_tile

HEADS, KV_HEADS = 16, 2
LENGTHS = (1, 100, 640, 2048, 5000, 8192, 40_000)
ONE_PASS, TWO_PASS = Template.ONE_PASS, Template.TWO_PASS
generated = partial(kernels.generated, batch=1, kv_heads=KV_HEADS, q_len=512, kv_len=512, dynamic=True)


def grids(code: Generated, length: int) -> dict[str, int]:
    """Template of each kernel -> CTAs that the generated code launches of it."""
    scope: dict[str, Any] = {}

    def ctas(expression: str) -> int:
        return eval(re.sub(r"\bs\d+\b", str(length), expression), scope)

    exec("\n".join(re.findall(r"^(?:from dash_inductor\.schedule.* import .*|dash_choice_\w+ = .*)$", code.source, re.M)), scope)
    launched = {}
    for name, template in code.templates.items():
        (line,) = code.launches[name]
        x, y, z = ast.parse(line, mode="eval").body.args[-3:]
        assert (ast.unparse(y), ast.unparse(z)) == ("1", "1")
        launched[template] = ctas(ast.unparse(x))
    for launch in kernels.gluon_launches(code):
        launched[ONE_PASS] = ctas(launch["workers"])
    return launched


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{}, {"launch": "chained"}], ids=["grouped", "chained"])
@pytest.mark.parametrize(("key", "head_dim"), [("rtx4090", 128), ("h100", 64), ("h100", 128)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_or_the_other_is_launched(key: str, head_dim: int, mask: str, settings: dict[str, str]) -> None:
    """The one that a graph of that very length would have. One pass is by Gluon on an H100."""
    settings = settings | {"kernel": "auto"}
    code = generated(key, settings=settings, head_dim=head_dim, mask=mask)
    assert (kernels.GLUON_OP in code.source) == (key == "h100")
    gpu = device(key)
    target = Target(gpu.key, gpu.arch, gpu.sms)
    taken = set()
    for length in LENGTHS:
        with enabled(**settings):
            resolution = resolve(Problem(mask, 1, HEADS, KV_HEADS, length, length, head_dim, "bf16"), current(), target)
        two = resolution.template == TWO_PASS
        launched = grids(code, length)
        assert set(launched) == {ONE_PASS, TWO_PASS}
        if two:
            tile = two_pass_tile(gpu.arch, "bf16", head_dim)
            ctas = KV_HEADS * -(-length // tile.kv_rows) + HEADS * -(-length // tile.q_rows)
            assert launched == {ONE_PASS: 0, TWO_PASS: ctas}
        else:
            assert launched[ONE_PASS] > 0 and launched[TWO_PASS] == 0
        taken.add(two)
    assert taken == {True, False}


@pytest.mark.parametrize(
    ("key", "head_dim"), [pytest.param("h100", 64, marks=pytest.mark.nightly), ("h100", 128), ("a100", 128), ("b200", 64)]
)
def test_the_gates(key: str, head_dim: int) -> None:
    """They pass for two passes that write where one would: dq^T at a head dim of 128 on Hopper, dq elsewhere."""
    code = generated(key, head_dim=head_dim)
    assert list(code.templates.values()) == [ONE_PASS, TWO_PASS]
    for name in code.templates:
        assert kernels.broken_gates(code, key, name, head_dim)[1] == []


@pytest.mark.parametrize("settings", [{"guarantee": "device"}, {"schedule": "descending"}, {"sm_reserve": 4}])
def test_one_pass_alone_where_sizes_must_not_decide(settings: dict[str, Any]) -> None:
    assert list(generated(settings=settings, head_dim=64).templates.values()) == [ONE_PASS]
