"""The attention benchmark without a GPU: shapes, statistics, the reference, verdicts, the table and its pictures."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pandas
import pytest
import torch
from attention_results import COMMON, DECISION, PACKED, STOCK, TINY, TINY_FLEX, flagship_rows, result

from benchmarks.attention import plot as pictures
from benchmarks.attention import report_md
from benchmarks.attention.table import typed
from dash_inductor.qualify import contenders as who
from dash_inductor.qualify.inputs import Reference, random_inputs
from dash_inductor.qualify.measure import ERROR_FACTOR, FIXED_ERROR, Result, allowed_error, judged
from dash_inductor.qualify.report import Prediction, kernels, predictions, rows_of, shown, targets
from dash_inductor.qualify.rows import OK, append, cells_of, read, read_cells
from dash_inductor.qualify.samples import interleaved, summary
from dash_inductor.qualify.shapes import FLEX, MASKS, MODELS, SHAPES, SWEEP, Shape
from dash_inductor.reproduce.bits import same_bits

pytestmark = pytest.mark.nightly


def test_flop():
    assert SHAPES[0].name == "d128-causal-8192"
    assert SHAPES[0].flop == 1_374_389_534_720  # 5 * 2 * (2 * 16 heads) * 8192^2 * 128 / 2
    assert all(shape.flex for shape in FLEX) and not any(shape.flex for shape in (*SWEEP, *MODELS))


def visible(shape: Shape) -> torch.Tensor:
    """bool [query, key], one by one."""
    document = [n for n, length in enumerate(shape.documents or (shape.length,)) for _ in range(length)]

    def sees(m: int, n: int) -> bool:
        near = shape.window is None or abs(m - n) < shape.window
        return document[m] == document[n] and near and (n <= m or not shape.causal)

    return torch.tensor([[sees(m, n) for n in range(shape.length)] for m in range(shape.length)])


@pytest.mark.parametrize("shape", [TINY, replace(TINY, mask="full"), *TINY_FLEX.values()])
def test_flop_of_what_is_visible(shape):
    """Of a causal mask the diagonal counts half, as in half of all pairs."""
    pairs = visible(shape).sum().item() - (shape.length / 2 if shape.causal else 0)
    assert shape.flop == 5 * 2 * shape.batch * shape.heads * pairs * shape.head_dim


@pytest.mark.parametrize(
    ("values", "quantiles"),
    [
        ([7.0], (7, 7, 7)),
        ([1.0, 9.0, 2.0, 4.0], (3, 1.6, 6)),
    ],
)
def test_summary(values, quantiles):
    """Median, p20 and p80, linear between order statistics."""
    assert summary(values) == pytest.approx(quantiles)
    with pytest.raises(ValueError, match="values"):
        summary([])


def test_interleaved():
    called: list[str] = []

    def timer(name):
        return lambda: (called.append(name), float(len(called)))[1]

    times = interleaved({name: timer(name) for name in "abc"}, rounds=4, warm_up=2)
    rounds = [called[n : n + 3] for n in range(0, len(called), 3)]
    assert len(rounds) == 6 and all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert [r[0] for r in rounds[2:]] == ["a", "b", "c", "a"]
    for name, own in times.items():  # in the order of the rounds, without those of the warm-up
        assert own == [3 * n + rounds[n].index(name) + 1 for n in range(2, 6)]
    assert interleaved({}, 3) == {}


@pytest.mark.parametrize(("warm_up", "rounds"), [(3, 2), (0, 1)])
def test_rounds_end_early_and_whole(warm_up, rounds):
    """Every timer has as many times as the others, and one at least, whatever the clock says."""
    answers = iter([False] * (rounds - 1) + [True])
    timers = {name: lambda: 1.0 for name in "ab"}
    assert interleaved(timers, 4, warm_up, lambda: next(answers)) == {"a": [1.0] * rounds, "b": [1.0] * rounds}


def dense(shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The attention by its formulas."""
    key, value = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(shape.head_dim)
    scores = scores if shape.softcap is None else shape.softcap * torch.tanh(scores / shape.softcap)
    if shape.alibi:
        slopes = torch.tensor([2 ** (-8 * (head + 1) / shape.heads) for head in range(shape.heads)]).to(scores)
        places = torch.arange(shape.length).to(scores)
        scores = scores + slopes[:, None, None] * (places - places[:, None])
    return scores.masked_fill(~visible(shape), -math.inf).softmax(-1) @ value


GROUPS = {f"{mask}, {kv_heads} kv heads": replace(TINY, mask=mask, kv_heads=kv_heads) for mask in MASKS for kv_heads in (4, 2, 1)}
TINY_SHAPES = GROUPS | TINY_FLEX


@pytest.mark.parametrize("shape", TINY_SHAPES.values(), ids=TINY_SHAPES)
def test_reference(shape, monkeypatch):
    monkeypatch.setattr("dash_inductor.qualify.inputs.ROWS", 16)  # several parts, the last one ragged
    inputs = random_inputs(shape, "cpu", torch.float64)
    grads = torch.autograd.grad(dense(shape, *inputs.leaves), inputs.leaves, inputs.grad_out)
    reference = Reference.of(shape, inputs, torch.float64)
    kv_heads = shape.kv_heads
    assert list(reference.grads) == sorted({(0, 0), (1, kv_heads - 1)})
    assert max(reference.errors(grads).values()) < 1e-14

    for n, name in enumerate(("dq", "dk", "dv")):
        for place in ((0, 0), (1, -1)):
            changed = [grad.clone() for grad in grads]
            changed[n][place][-1] += 1
            errors = reference.errors(tuple(changed))
            assert errors.pop(name) > 0.01 and max(errors.values()) < 1e-14
            changed[n][place][-1] = math.nan
            assert math.isnan(reference.errors(tuple(changed))[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits(dtype):
    x = torch.tensor([[1.0, math.nan], [0.0, 2.0]], dtype=dtype)
    assert same_bits(x, x.clone()) and same_bits(x.T, x.T.clone())
    assert not same_bits(x, torch.tensor([[1.0, math.nan], [-0.0, 2.0]], dtype=dtype))


def test_allowed_error():
    assert allowed_error(result(who.BASELINE, error=0.003)) == ERROR_FACTOR * 0.003
    assert allowed_error(result(who.BASELINE, error=0.3)) == FIXED_ERROR  # a baseline that is wrong itself
    assert allowed_error(result(who.BASELINE, error=math.nan)) == FIXED_ERROR
    assert allowed_error(Result(STOCK[who.BASELINE], "refused: no")) == allowed_error(None) == FIXED_ERROR


@pytest.mark.parametrize(
    ("measured", "status"),
    [
        (result("ours", 1.0), OK),
        (result("ours", 1.0, error=0.011), "wrong: dq 1.1e-02 off, allowed 1.0e-02"),
        (result("ours", error=math.nan), "wrong: dq nan off, allowed 1.0e-02"),
        (result("ours", same_bits=False), "not deterministic: bits differ within 4 launches"),
        (result("sdpa-flash", same_bits=False), OK),
        (result("sdpa-efficient-strict", same_bits=None), OK),  # launched once: nothing to compare
        (result("ours-unordered", error=1.0, same_bits=False), OK),  # only its time is meant
        (Result(STOCK["ours"], "refused: d"), "refused: d"),
    ],
)
def test_verdicts(measured, status):
    assert judged(measured, 0.01) == replace(measured, status=status)


def test_rows():
    baseline, ours, unordered, absent = flagship_rows()
    assert (ours.median_ms, ours.p20_ms, ours.p80_ms) == pytest.approx((2.5, 2.2, 3.4))
    assert ours.tflops == pytest.approx(1374.389534720 / 2.5)
    assert ours.speedup == pytest.approx(3.0)  # of 3, 3, 2.8: not the ratio of medians, which is 2.8
    assert ours.speedup_p20 == pytest.approx(2.88)
    assert ours.price == pytest.approx(2.0) and unordered.price is None
    assert baseline.speedup == 1.0 and baseline.twin == "sdpa-flash" and baseline.price is None
    assert (ours.schedule, ours.launch, ours.tile, ours.predicted_ms) == ("descending (A=4, G=32)", "grouped", "64x128x128", 2.5)
    assert (ours.workspace_bytes, ours.rounds, ours.times_ms, ours.sm_mhz) == (1 << 27, 3, (2.0, 4.0, 2.5), 1980)
    assert absent.status == "not available: flash_attn.cute is not importable"
    assert absent.median_ms is absent.speedup is absent.same_bits is absent.error is None


def test_a_time_that_the_mask_decides_is_not_predicted():
    """Nor is it held against a prediction."""
    decision = replace(DECISION, mask="block_mask", roles=None, heads_in_flight=None, predicted_us=None, step_ns=1800)
    ours = result("ours", 2.0, 3.0, prepared=who.Prepared(lambda: (), decision))
    (row,) = rows_of(FLEX[1], [ours], mhz=None, **{**COMMON, "baseline": "flex"})
    assert (row.predicted_ms, row.schedule, row.status) == (None, "descending", OK)
    assert (row.window, row.documents, row.softcap) == (4096, (), 50.0)
    text = report_md.report(
        environments={"a": {"gpu": "NVIDIA H100", "arch": 90}},
        summary="",
        rows=typed(map(cells_of, [flagship_rows()[1], row])),
        additions=None,
        costs=None,
    )
    assert "as fast as `sdpa-flash-strict`, at shapes of FlexAttention `flex` in the same rounds" in text
    assert f"| {FLEX[1].name} | " in text and f"| {FLEX[1].name} | descending" not in text.partition("predictions")[2]


def test_a_contender_that_took_no_turns_has_a_time_and_no_ratio():
    results = [result(who.BASELINE, 6.0, 12.0), result("sdpa-efficient-strict", 900.0)]
    baseline, slow = rows_of(SHAPES[0], results, mhz=None, **COMMON)
    assert (slow.median_ms, slow.rounds, slow.speedup, baseline.speedup) == (900.0, 1, None, 1.0)


def test_csv_round_trip(tmp_path):
    path = tmp_path / "table.csv"
    strange = replace(flagship_rows()[1], note='says "a, b"\nand more', same_bits=False, error=0.25)
    flex = replace(flagship_rows()[0], window=9, documents=PACKED, softcap=1.5)
    rows = [*flagship_rows((2.0, 4.0, 3.0)), strange, flex]
    append(path, rows[:2])
    append(path, rows[2:])
    table = typed(read_cells(path))
    for found, cells, row in zip(read(path), table.to_dict("records"), rows, strict=True):
        assert list(cells) == list(asdict(row))
        for name, value in asdict(row).items():
            digits = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value  # six in the file
            assert getattr(found, name) == digits, name
            assert pandas.isna(cells[name]) if value is None else cells[name] == digits, name
    assert path.read_text().count("median_ms") == 1


@pytest.mark.parametrize("note", ["short", 'two\n"lines"'])
def test_a_file_that_was_cut_off_in_its_last_row(note, tmp_path):
    """Wherever it was cut: the row is none, and the next one takes its place."""
    path = tmp_path / "table.csv"
    first, last = (replace(row, note=note) for row in flagship_rows()[:2])
    append(path, [first])
    whole = path.read_bytes()
    append(path, [last])
    both = path.read_bytes()
    marks = [n for n in range(len(whole) + 1, len(both)) if both[n - 1 : n] in (b"\n", b'"')]  # behind an end of line, a quote
    for length in (*range(len(whole), len(both), 25), *marks, len(both) - 1):
        path.write_bytes(both[:length])
        assert read_cells(path) == [cells_of(first)]
        append(path, [last])
        assert path.read_bytes() == both
    path.write_bytes(both[:20])  # in the header
    append(path, [first])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "a,b"])
def test_csv_of_another_kind(text, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text(text)
    for use in (read, lambda path: append(path, flagship_rows())):
        with pytest.raises(ValueError, match="columns"):
            use(path)
    assert path.read_text() == text


def test_errors_that_are_not_numbers_are_shown():
    _, ours, _, absent = flagship_rows()
    assert [line["error"] for line in shown([ours, replace(ours, error=math.nan), absent])] == ["2.0e-03", "nan", ""]


def test_targets():
    def verdicts(rows):
        return [line[""] for line in targets(rows)]

    allowed = 2 * 16 * 8192 * (4 * 128 + 8)
    ours = replace(flagship_rows()[1], price=1.03, peak_bytes=allowed, workspace_bytes=allowed + (1 << 20))
    assert verdicts([ours]) == ["met", "met", "met"]
    assert verdicts([replace(ours, speedup=2.49)]) == ["MISSED", "met", "met"]
    assert verdicts([ours, replace(ours, shape="other", price=1.031)]) == ["met", "MISSED", "met"]
    for memory in ("peak_bytes", "workspace_bytes"):
        assert verdicts([replace(ours, **{memory: allowed + (1 << 20) + 1})]) == ["met", "met", "MISSED"]
    two_pass = replace(ours, shape="other", price=1.5, schedule="two_pass (deterministic by construction)")
    assert verdicts([ours, two_pass]) == ["met", "met", "met"]  # whose twin is another kernel
    assert verdicts([replace(ours, baseline="ours")])[0] == "not measured"
    for rows in ([], [replace(ours, status="wrong: dq")], [replace(ours, contender="ours-shift")]):
        assert verdicts(rows) == ["not measured"] * 3


def test_the_kernel_to_use():
    """At a head dim where the kernel in Gluon is right and faster at every shape; of what was timed in one run."""
    ours = replace(flagship_rows()[1], median_ms=2.0)
    gluon, other = replace(ours, contender="ours-gluon", median_ms=1.8), replace(ours, shape="other")
    (line,) = kernels([ours, gluon, other, replace(gluon, shape="other", median_ms=1.9)])
    assert list(line.values()) == ["128", "2", "0.900 to 0.950", "kernel='gluon'"]
    (line,) = kernels([ours, gluon, other, replace(gluon, shape="other", median_ms=2.0)])
    assert line["use"] == "kernel='auto'"
    for status in ("wrong: dq", "not deterministic: launch 12"):
        (line,) = kernels([ours, gluon, other, replace(gluon, shape="other", status=status)])
        assert (line["shapes"], line["use"]) == ("1", "kernel='auto'")
    # Where ours is the kernel in Gluon, it is beside the kernel of Triton by name.
    ours, triton = replace(ours, kernel="gluon"), replace(ours, contender="ours-triton")
    for ms, use in ((1.8, "kernel='auto'"), (2.1, "kernel='triton'")):
        (line,) = kernels([ours, triton, replace(gluon, median_ms=ms)])
        assert (line["time by gluon / by triton"], line["use"]) == (f"{ms / 2:.3f} to {ms / 2:.3f}", use)
    assert kernels([ours, gluon]) == []
    ours = replace(triton, contender="ours")
    assert kernels([ours, replace(gluon, status="wrong: dq")]) == kernels([ours, replace(gluon, run="another")]) == []


@pytest.fixture
def synthetic(tmp_path) -> Path:
    """A table with every shape and three contenders, of times that the test makes up."""
    path = tmp_path / "table.csv"
    for n, shape in enumerate(SHAPES):
        times = [1.0 + n + r / 10 for r in range(5)]
        results = [result(name, *times) for name in (who.BASELINE, "ours", "ours-unordered")]
        append(path, rows_of(shape, results, mhz=None, **COMMON))
    return path


def test_pictures(synthetic, tmp_path):
    pytest.importorskip("matplotlib")
    pictures.plot(typed(read_cells(synthetic)), tmp_path)
    for name in ("attention.png", "models.png", "flex.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_predictions():
    """Ours as it is, not its variants of the same schedule; off by more than a quarter it did not hold."""
    _, ours, unordered, absent = flagship_rows()
    assert predictions([ours, replace(ours, contender="ours-two-stages", median_ms=9.0), unordered, absent]) == [
        Prediction(SHAPES[0].name, ours.schedule, 2.5, 2.5)
    ]
    for ms, held in ((2.5 * 1.25, True), (2.5 * 1.26, False), (2.0, True), (1.98, False)):
        (found,) = predictions([replace(ours, median_ms=ms)])
        assert (found.held, found.ratio) == (held, pytest.approx(ms / 2.5))
    assert predictions([replace(ours, status="wrong: dq")]) == []
    gluon = replace(ours, contender="ours-gluon", kernel="gluon", predicted_ms=2.2, median_ms=2.0)  # of a price of its own
    assert [(each.schedule, each.predicted_ms) for each in predictions([ours, gluon])] == [
        (ours.schedule, 2.5),
        (f"{ours.schedule}, Gluon", 2.2),
    ]
