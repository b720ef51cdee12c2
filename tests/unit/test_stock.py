"""What is known of stock backwards: whether they are deterministic, by mode, torch and implementation, and what they allocate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import _registry, activate_flash_attention_impl, restore_flash_attention_impl
from torch.torch_version import TorchVersion

from dash_inductor.decision import Decision, Kernel, Stock, claim_of, kernel_of, stock_is_deterministic, stock_workspace_bytes
from dash_inductor.decision.stock import DETERMINISM, known_of
from dash_inductor.explanation.report import Attention, Explanation
from dash_inductor.hooks import recording
from dash_inductor.op import FLEX_BACKWARD
from dash_inductor.rewrite.math_path import OP as MATH_PATH
from dash_inductor.rewrite.stock_ops import CUDNN, CUDNN_JAGGED, EFFICIENT, FLASH, FLASH_CPU, TARGETS, UNSUPPORTED, VARLEN, stock_of

DOCS = Path(__file__).parents[2] / "docs"
OF_PACKAGE = "_flash_attn2_588b404._flash_attn_backward.default"
HALF_WRITTEN = "https://github.com/Dao-AILab/flash-attention/issues/2244"


@pytest.fixture(autouse=True)
def of_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known holds for that torch, whichever runs the tests."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))


def declined(
    op: object, device: str = "h100", stock_differs: bool | None = False, implementation: str | None = None, **others: object
) -> Decision:
    given = {"batch": 1, "heads": 16, "kv_heads": 16, "q_len": 8000, "kv_len": 8000, "head_dim": 72, "mask": "full"} | others
    named = {"reason": "", "stock_differs": stock_differs, "implementation": implementation}
    return Decision(str(op), device, "bf16", **named, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (declined(FLASH), (True, False)),
        (declined(FLASH, implementation="FA3"), (None, None)),
        (declined(FLASH, implementation="FA4"), (True, True)),
        (declined(FLASH, implementation="MINE"), (None, None)),
        (declined(EFFICIENT), (True, False)),
        (declined(VARLEN), (True, False)),
        (declined(VARLEN, implementation="CUDNN"), (True, True)),
        (declined(VARLEN, stock_differs=True), (False, False)),
        (declined(CUDNN), (False, False)),
        (declined(CUDNN, implementation="CUDNN"), (True, True)),
        (declined(CUDNN_JAGGED), (False, False)),
        (declined(FLEX_BACKWARD), (True, True)),
        (declined("flex_attention"), (None, None)),
        (declined(FLEX_BACKWARD, stock_differs=True), (False, False)),
        (declined(FLEX_BACKWARD, chosen_by_timing="forward"), (False, False)),
        (declined(FLASH_CPU, "cpu"), (True, True)),
        (declined(MATH_PATH), (None, None)),
        (declined("aten._new_flash_attention_backward.default"), (None, None)),  # of which nothing but a name is known
        (declined(OF_PACKAGE, stock_differs=True, implementation="FA2"), (False, False)),
        (declined(OF_PACKAGE, implementation="FA2"), (True, True)),
        (declined(OF_PACKAGE, stock_differs=None, implementation="FA3"), (None, None)),
        (declined(OF_PACKAGE, stock_differs=None), (None, None)),
    ],
    ids=lambda x: f"{x.op} {x.implementation} {x.stock_differs}" if isinstance(x, Decision) else "",
)
def test_which_is_deterministic(decision, expected):
    """In strict mode, and under warn_only."""
    assert tuple(stock_is_deterministic(decision, warn_only=warn_only) for warn_only in (False, True)) == expected


@pytest.mark.parametrize(
    ("decision", "claimed"),
    [
        (declined(FLASH, implementation="FA3"), True),
        (declined(OF_PACKAGE, stock_differs=None, implementation="FA3"), True),
        (declined(OF_PACKAGE, stock_differs=True, implementation="FA3"), False),
        (declined(OF_PACKAGE, stock_differs=None), False),
        (declined(FLASH, implementation="FA4"), False),
    ],
)
@pytest.mark.parametrize("warn_only", [False, True])
def test_a_claim_is_told_with_its_source(decision, claimed, warn_only):
    """And is no promise."""
    row = Attention.of(decision, 132, warn_only=warn_only)
    said = " ".join(str(Explanation("h100", (row,), "run", warn_only, {})).split())
    assert claim_of(decision, warn_only=warn_only) == row.claim == (HALF_WRITTEN if claimed else None)
    assert (f"claimed to be deterministic, and not proven ({HALF_WRITTEN})" in said) == claimed
    assert ("may differ from run to run. Other operations" in said) == (row.deterministic is not True)


def test_every_op_that_is_met_is_in_the_table():
    """But one for the CPU, and that of another backend."""
    without = {FLASH_CPU, *UNSUPPORTED} - {CUDNN_JAGGED}
    assert {op for op in (*TARGETS, CUDNN_JAGGED) if kernel_of(str(op)) is None} == without
    assert all((kernel, None) in DETERMINISM for kernel in Kernel)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Activates an implementation of a name, which computes nothing."""

    def activate(name: str) -> None:
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda: SimpleNamespace(remove=lambda: None))
        activate_flash_attention_impl(name)

    yield activate
    restore_flash_attention_impl(_raise_warn=False)


BIAS = {"attn_bias": torch.ones(1)}


@pytest.mark.parametrize(
    ("name", "op", "named", "implementation", "deterministic"),
    [
        ("FA3", FLASH, {}, "FA3", False),  # it claims to be
        ("FA4", FLASH, {}, "FA4", True),
        ("FA4", VARLEN, {}, "FA4", True),
        ("FA4", CUDNN, {}, None, False),
        ("FA4", EFFICIENT, {}, None, False),
        ("CUDNN", FLASH, {}, None, False),
        ("CUDNN", VARLEN, {}, "CUDNN", True),
        ("CUDNN", CUDNN, {"attn_bias": None, "dropout_p": 0.0}, "CUDNN", True),
        ("CUDNN", CUDNN, BIAS, None, False),
        ("CUDNN", CUDNN, {"dropout_p": 0.1}, None, False),
        ("CUDNN", CUDNN, {"cum_seq_q": torch.ones(1)}, None, False),
        ("CUDNN", CUDNN_JAGGED, {}, None, False),
        ("MINE", FLASH, {}, "MINE", False),
        ("DASH", FLASH, {}, None, False),  # stands in front of torch's own
        ("MINE", FLEX_BACKWARD, {}, None, True),
    ],
)
def test_an_implementation_of_the_registry_is_asked_of_each_call(
    active, monkeypatch, name, op, named, implementation, deterministic
):
    """Under warn_only, where torch's own are not deterministic."""
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: True)
    active(name)
    stock = stock_of(op, named)
    assert stock and (stock.implementation, stock.is_deterministic) == (implementation, deterministic)


def test_a_graph_sees_that_one_is_gone(active, monkeypatch):
    """Whichever it was left to."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    active("CUDNN")
    graph = SimpleNamespace(current_callable=len)
    recording._require_implementations(graph, [declined(CUDNN, left_to="CUDNN")])
    assert graph.current_callable("four") == 4
    active("FA4")
    with pytest.raises(RuntimeError, match="left an attention of this graph to CUDNN, which was active"):
        graph.current_callable("four")


def test_a_claim_is_enough_where_the_user_set_the_flag_of_the_op():
    assert Stock(Kernel.FLASH, True, "FA3", called=True).may_stay and not Stock(Kernel.FLASH, True, "FA3").may_stay
    assert Stock(Kernel.FLASH, True, "FA4").may_stay and not Stock(Kernel.FLASH, True, "MINE", called=True).may_stay


@pytest.mark.parametrize(("version", "verdict"), [("2.12.1", "unknown"), ("2.13.0", "yes"), ("2.15.0+cu130", "yes")])
def test_what_holds_since_a_torch(monkeypatch, version, verdict):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert known_of(Kernel.CUDNN, "CUDNN").strict == known_of(Kernel.FLASH, "CUDNN").warn_only == verdict


def test_sources_are_on_the_page_of_alternatives():
    page = (DOCS / "alternatives.md").read_text()
    assert all(known.source in page for known in DETERMINISM.values())


def test_what_flash_attention_allocates():
    """dq in fp32 for each split, rounded up to 128 rows and 32 columns; a row each of fp32; in GQA a dk and dv per query head."""
    dq = 9 * 16 * 8064 * 96 * 4
    assert stock_workspace_bytes(declined(FLASH), sms=132) == dq + 16 * 8064 * 4
    assert stock_workspace_bytes(declined(FLASH, kv_heads=2), sms=132) == dq + 16 * 8064 * 4 + 2 * 16 * 8000 * 72 * 2


@pytest.mark.parametrize(
    "decision",
    [
        declined(CUDNN),
        declined(FLASH, q_len="s0"),
        declined(FLASH, mask="varlen"),
        declined(MATH_PATH),
        declined(FLASH, implementation="FA4"),
        declined(OF_PACKAGE, implementation="FA2"),
    ],
)
def test_what_is_not_known(decision):
    assert stock_workspace_bytes(decision, sms=132) is None
