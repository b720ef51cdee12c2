"""What is known of each kernel at each level, and of other backwards: from results, tests and the table that decides."""

from __future__ import annotations

from benchmarks.markdown import markdown
from dash_inductor.config import CHOICES, GLUON, Config
from dash_inductor.decision import Declined
from dash_inductor.decision.stock import DETERMINISM
from dash_inductor.devices import DEVICES, NamedDevice
from dash_inductor.devices.target import Target
from dash_inductor.problem import DTYPES, Problem
from dash_inductor.resolve import resolve

from . import results

MEASURED, EXECUTED, EMULATED, UNVERIFIED, DECLINED = "measured", "executed", "emulated", "unverified", "declined"
RUN = "run"
# How a promise of the levels above `run` was tested, by the language of kernels and the level, and the test.
TESTED = {
    ("triton", "device"): (EMULATED, "tests/emulated/test_sm_reserve.py::test_the_reserve_changes_workers_and_no_bits"),
    ("triton", "batch"): (EMULATED, "tests/emulated/test_packing.py::test_alone_and_packed"),
    (GLUON, "device"): (EXECUTED, "tests/ptx/test_execute.py::test_one_row_for_all_chains"),
    (GLUON, "batch"): (EXECUTED, "tests/ptx/test_execute.py::test_other_attentions"),
}
LEGEND = """\
- *measured*: on that GPU gradients were right, and bits equal from launch to launch, at some head dim and mask.
- *executed*: the kernel's PTX for that GPU's architecture was executed on a CPU: gradients were right, and there was no data race.
- *emulated*: Triton's interpreter ran the kernel on a CPU, in the dtype of the test below and not in each of the rows', with other
  numbers of SMs at `device`, in other batches at `batch`.
- *unverified*: compiled at most. *declined*: it keeps its stock kernel there, with a reason."""


def levels(_: str) -> str:
    """A row per kernel, dtype and level, a column per GPU; the tests of the stronger levels."""
    ran, executed = results.tried(), results.never_bad()
    rows = [
        {
            "kernel": kernel,
            "dtype": dtype,
            "level": f"`{level}`",
            **{gpu.key.upper(): _cell(kernel, dtype, level, gpu, ran, executed) for gpu in DEVICES.values()},
        }
        for kernel in results.KERNELS
        for dtype in DTYPES.values()
        for level in CHOICES["guarantee"]
    ]
    shown = [row for row in rows if {*row.values()} - {row["kernel"], row["dtype"], row["level"], DECLINED}]
    tests = [f"- `{level}`, {language.capitalize()}, {how}: `{test}`" for (language, level), (how, test) in TESTED.items()]
    left = sorted({row["dtype"] for row in rows} - {row["dtype"] for row in shown})
    return "\n".join([markdown(shown), "", f"Every GPU declines {', '.join(left)}.", "", LEGEND, "", *tests])


def _cell(
    kernel: str, dtype: str, level: str, gpu: NamedDevice, ran: dict[str, set[results.Kind]], executed: set[tuple[str, int]]
) -> str:
    template, language = results.KERNELS[kernel]
    problem = Problem("causal", 1, 16, 16, 8192, 8192, 128, dtype)
    settings = Config(template=template, kernel=language, guarantee=level)
    try:
        resolve(problem, settings, Target(gpu.key, gpu.arch, gpu.sms))
    except Declined:
        return DECLINED
    if level != RUN:
        return TESTED[language, level][0]
    if any((kind.kernel, kind.dtype) == (kernel, dtype) for kind in ran.get(gpu.name, ())):
        return MEASURED
    return EXECUTED if (language, gpu.arch) in executed else UNVERIFIED


def stock(_: str) -> str:
    """A row per kernel that may stay, with whether it has the same bits in every run by its source."""
    return markdown(
        [
            {
                "backward": kernel.value,
                "by": implementation or "PyTorch",
                "mode off": known.off.value,
                "`warn_only`": known.warn_only.value,
                "strict": known.strict.value,
                "since torch": ".".join(map(str, known.since)) if any(known.since) else "",
                "source": f"[source]({known.source})",
            }
            for (kernel, implementation), known in DETERMINISM.items()
        ]
    )
