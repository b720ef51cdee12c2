"""The first minutes on a new GPU: whether the kernels are right there, how fast they are beside others, and what was predicted.

Kernels run on small attentions: gradients against float64, 20 launches with equal bits, half of them beside other work on the GPU.
Then backwards are timed: ours, PyTorch's in strict mode and otherwise, and others that are installed, in turns, on a cold L2. A
contender that is wrong, or not deterministic though it promises to be, gets no time. It takes at most 3 minutes.

Nothing is changed, and of the settings DASH_INDUCTOR_COSTS alone is obeyed. --write measures the constants of the cost model too,
in at most 3 minutes more, and writes a cost file of this GPU, which DASH_INDUCTOR_COSTS=PATH takes. Bits at the guarantee run
depend on the cost file.

--prepare compiles, without a GPU, what the same command would compile on one, and packs it; --prepared begins with that. torch,
Triton, Python and this package have to be the same. Prepared anew it compiles what is missing, and says how many kernels that were,
and what is left for the GPU.

--variants names a folder of copies of templates/gluon that are changed: the stage schedules times them beside the kernel as it is,
and says whose bits are others.

--full has every stage in three parts that need nothing from each other, each of at most 9 minutes, and keeps all in --out. A run
may be interrupted: what was done is kept and printed. The exit status is 1 if something is wrong or a stage fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices import DEVICES
from ..devices.cost_files import FOLDER as SHIPPED
from ..devices.cost_files import SUFFIX
from .arguments import add_json
from .console import CommandError, note, print_json, section, table

if TYPE_CHECKING:
    from ..qualify.kernels import Finding
    from ..qualify.rows import Row
    from ..qualify.stages import Outcome, Stage

EXAMPLES = (
    "",
    "--shapes llama3-8b,causal:2x32x8x8192x128 --json",
    "--write mine.toml",
    "--full --part 1 --out first_run",
    "--full --dry-run --out first_run",
    "--full --part 1 --prepare prepared --device h200",
    "--full --part 1 --prepared prepared --out first_run",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `qualify`."""
    parser.add_argument(
        "--shapes", metavar="NAMES", help="names or patterns, or sizes as MASK:BxHxKxSxD (batch, heads, kv heads, length, head dim)"
    )
    parser.add_argument("--contenders", metavar="NAMES", help="names or patterns; the baselines come along")
    parser.add_argument("--write", metavar="PATH", type=Path, help="also measure the cost constants, and write a cost file")
    parser.add_argument("--out", metavar="DIR", type=Path, help="keep all that is found in DIR")
    parser.add_argument("--full", action="store_true", help="every stage, in three parts; needs --out")
    parser.add_argument("--part", type=int, choices=(1, 2, 3), help="of --full, this part alone")
    parser.add_argument("--stages", metavar="NAMES", help="of what would run, these stages alone")
    parser.add_argument("--prepare", metavar="FOLDER", type=Path, help="compile what would run, for --device; needs no GPU")
    parser.add_argument("--device", choices=DEVICES, default="h200", metavar="GPU", help="of --prepare: h200 by default")
    parser.add_argument("--prepared", metavar="FOLDER", type=Path, help="begin with the caches that --prepare left there")
    parser.add_argument("--variants", metavar="FOLDER", type=Path, help="of --full: copies of templates/gluon to time")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and for how long at most; needs no GPU")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Run the stages and print what they found; 1 if something is wrong. CommandError where there is nothing to qualify."""
    from ..qualify import stages as of

    chosen = chosen_stages(args)
    if args.dry_run and args.json:
        print_json([{"part": s.part, "stage": s.name, "seconds": s.seconds, "purpose": s.purpose} for s in chosen])
        return 0
    if args.dry_run:
        table("Stages", [{"part": s.part or "", "stage": s.name, "s": s.seconds, "purpose": s.purpose} for s in chosen])
        print(f"\nat most {of.seconds_of(chosen)} s")
        return 0
    if args.prepare:
        return _prepare(chosen, args.prepare, args.device)
    import torch

    if not torch.cuda.is_available():
        raise CommandError("qualify needs a GPU, and torch.cuda.is_available() is False here")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary, "found")
        folder.mkdir(parents=True, exist_ok=True)
        caches = Path(temporary, "caches")
        if args.prepared:
            from ..qualify import prepare

            about = prepare.unpack(args.prepared, caches)
            if about is None:
                raise CommandError(f"--prepared {args.prepared}: --prepare has left nothing there")
            note(f"begins with {about['kernels']} kernels of {about['graphs']} graphs, compiled before for {about['device']}")
        return _report(folder, _run(chosen, folder.resolve(), caches), args)


def _prepare(chosen: Sequence[Stage], folder: Path, device: str) -> int:
    """Compiles what the stages would, and says how large it is; 1 if that is too large."""
    from ..qualify import prepare
    from ..qualify import stages as of

    with tempfile.TemporaryDirectory() as temporary:
        caches = Path(temporary, "caches")
        done = prepare.run(chosen, folder, device, caches, of.environ_of(os.environ, caches), os.cpu_count() or 1)
    size = done.pop("bytes")
    said = f"{size / 2**20:.1f} MB of at most {prepare.MOST_BYTES >> 20}"
    section("Prepared", {name: str(value) for name, value in done.items()} | {"size": said})
    section("Left for the GPU, before first launches", {str(n): text for n, text in enumerate(prepare.LEFT, 1)})
    return int(size > prepare.MOST_BYTES)


def chosen_stages(args: argparse.Namespace) -> list[Stage]:
    """Those that the arguments ask for; CommandError for arguments that make no sense."""
    from ..qualify import stages as of

    if args.part and not args.full:
        raise CommandError("--part is of --full")
    if args.full and args.out is None and not args.prepare:
        raise CommandError("--full keeps what it finds: give --out DIR")
    if args.full and (args.shapes or args.contenders):
        raise CommandError("--full has shapes and contenders of its own: leave out --shapes and --contenders")
    if args.variants and not args.full:
        raise CommandError("--variants is of --full")
    if args.variants and not args.variants.is_dir():
        raise CommandError(f"--variants {args.variants}: there is no such folder")
    if args.write and args.write.suffix != SUFFIX:
        raise CommandError(f"--write {args.write}: a cost file ends in {SUFFIX}")
    if args.write and args.write.resolve().parent == SHIPPED.resolve():
        raise CommandError(f"--write {args.write}: the package's own cost files come with its releases alone; name another folder")
    chosen = list(of.DEFAULT)
    if args.full:
        chosen = [stage for stage in of.FULL if args.part in (None, stage.part)]
        chosen = [stage for n, stage in enumerate(chosen) if stage.name != of.ENVIRONMENT.name or n == 0]
    if args.write and of.COSTS.name not in [stage.name for stage in chosen]:
        chosen.append(of.COSTS)
    if args.stages is not None:
        names = args.stages.split(",")
        known = [stage.name for stage in chosen]
        for name in names:
            if name not in known:
                raise CommandError(f"there is no stage {name!r}; there are {', '.join(known)}")
        chosen = [stage for stage in chosen if stage.name in (of.ENVIRONMENT.name, *names)]
    return [_asked(stage, args) for stage in chosen]


def _asked(stage: Stage, args: argparse.Namespace) -> Stage:
    """The stage with the shapes and contenders that are asked for; ValueError for a name that is none."""
    if stage.task == "schedules" and args.variants:
        return replace(stage, arguments={**stage.arguments, "variants": str(args.variants.resolve())})
    if stage.job is None or not (args.shapes or args.contenders):
        return stage
    job = replace(stage.job, shapes=args.shapes or stage.job.shapes, contenders=args.contenders or stage.job.contenders)
    job.chosen()
    return replace(stage, job=job)


def _run(chosen: Sequence[Stage], folder: Path, caches: Path) -> list[Outcome]:
    """Runs stages until one is interrupted. CommandError where the first finds a GPU without kernels."""
    from ..qualify import stages as of
    from ..qualify.child import NO_KERNELS
    from ..qualify.environment import nvidia_smi

    environ, jobs = of.environ_of(os.environ, caches), of.jobs_of(nvidia_smi("compute_mode")[0])
    outcomes: list[Outcome] = []
    said: list[str] = []
    spare = 0

    def echo(line: str) -> None:
        said.append(line)
        note(f"  {line}")

    note("at most " + ", ".join(f"{stage.seconds} s for {stage.name}" for stage in chosen) + "; what one leaves the next one has")
    for n, asked in enumerate(chosen, 1):
        stage = of.with_spare(asked, spare)
        note(f"[{n}/{len(chosen)}] {stage.name}: {stage.purpose} (at most {stage.seconds} s)")
        outcomes.append(of.run(stage, folder, environ, jobs, echo))
        note(f"  {outcomes[-1].said}, {outcomes[-1].seconds} s")
        spare = max(0, stage.seconds - outcomes[-1].seconds)
        if outcomes[-1].code == NO_KERNELS:
            raise CommandError(said[-1])
        if outcomes[-1].said == of.INTERRUPTED:
            break
    return outcomes


def _report(folder: Path, outcomes: Sequence[Outcome], args: argparse.Namespace) -> int:
    """Copies the cost file that was fitted, if it is asked for, and prints what a folder has; the exit status."""
    from ..qualify import costs, environment, kernels, report, rows, runner

    fitted, written = folder / costs.COSTS, None
    if args.write and fitted.exists():
        written = shutil.copyfile(fitted, args.write)
    seen = environment.read(folder)
    findings = kernels.read(folder)
    table_of_rows = folder / runner.FILE
    timed = rows.read(table_of_rows) if table_of_rows.exists() else []
    held = report.predictions(timed)
    wrong = what_is_wrong(findings, timed, outcomes)
    if args.write and written is None:
        wrong.append(f"{args.write} was not written: no cost constants could be fitted")
    if args.json:
        print_json(
            {
                "environment": seen,
                "stages": [asdict(outcome) for outcome in outcomes],
                "kernels": [asdict(finding) for finding in findings],
                "backwards": [asdict(row) for row in timed],
                "predictions": [asdict(each) | {"ratio": each.ratio, "held": each.held} for each in held],
                "targets": report.targets(timed),
                "kernels_of_one_pass": report.kernels(timed),
                "wrong": wrong,
                "written": None if written is None else str(written),
            }
        )
        return int(bool(wrong))
    section("GPU", {name: seen[name] for name in ("gpu", "sms", "driver", "torch", "triton") if name in seen})
    if findings:
        print()
        table("Kernels, against float64", list(map(_shown, findings)))
        late = [finding.case for finding in findings if finding.status.startswith("not run")]
        if late:
            print(f"Not checked, for want of time: {'; '.join(late)}")
    if timed:
        print()
        _print_backwards(timed)
    if advice := report.kernels(timed):
        print()
        table("The kernel of one pass", advice)
    if held:
        print()
        lines = [
            {
                "shape": each.shape,
                "schedule": each.schedule,
                "predicted ms": f"{each.predicted_ms:.3f}",
                "measured ms": f"{each.measured_ms:.3f}",
                "measured / predicted": f"{each.ratio:.2f}",
                "": "held" if each.held else "DID NOT HOLD",
            }
            for each in held
        ]
        table("Predictions", lines)
        kept = sum(each.held for each in held)
        print(f"{kept} of {len(held)} held: measured within a factor of {report.TOLERANCE} of what the cost model predicted")
    print()
    table("Stages", [{"stage": o.stage, "": o.said, "s": o.seconds} for o in outcomes])
    print()
    for place, path in (("Kept in", args.out), ("Written", written)):
        if path is not None:
            print(f"{place}: {path}")
    section("What is wrong", {str(n): text for n, text in enumerate(wrong, 1)})
    return int(bool(wrong))


TIMES = ("ms", "TFLOPS", "speedup", "price")  # of whoever is right alone
ABSENT = "not available: "


def _print_backwards(timed: Sequence[Row]) -> None:
    """A table of all but the contenders that are not installed, which share a line."""
    from ..qualify import report
    from ..qualify.rows import OK

    absent = dict.fromkeys(f"{row.contender} ({row.status.removeprefix(ABSENT)})" for row in timed if row.status.startswith(ABSENT))
    lines = report.shown(row for row in timed if not row.status.startswith(ABSENT))
    lines = [line if line["status"] == OK else line | dict.fromkeys(TIMES, "") for line in lines]
    table("Backwards (medians; of ratios also p20 .. p80)", lines)
    print("speedup: how many times as fast as stock's deterministic kernel; price: the time over that of the same kernel without")
    print("determinism; error: against fp32. Contenders take turns, on a cold L2, and ratios are within a round.")
    if absent:
        print(f"Not measured: {', '.join(absent)}")


def what_is_wrong(findings: Iterable[Finding], timed: Iterable[Row], outcomes: Iterable[Outcome]) -> list[str]:
    """Kernels of ours that are wrong, variants made for a measurement left out, and stages that failed, in sentences."""
    from ..qualify import contenders as who
    from ..qualify import stages as of

    wrong = [f"{finding.case}: {finding.status}" for finding in findings if finding.is_wrong]
    wrong += [
        f"{row.contender} at {row.shape}: {row.status}"
        for row in timed
        if row.contender in who.contenders() and row.baseline != who.TUNED_BASELINE and row.contender.startswith("ours")
        if row.status.startswith(("wrong", "not deterministic", "failed"))
    ]
    return wrong + [f"stage {outcome.stage}: {outcome.said}" for outcome in outcomes if outcome.said not in (of.OK, of.NO_TESTS)]


def _shown(finding: Finding) -> dict[str, Any]:
    """A finding as a line of a table."""
    worst = max(finding.errors.values(), key=lambda error: (error != error, error), default=None)
    return {
        "case": finding.case,
        "schedule": finding.schedule,
        "error": "" if worst is None else f"{worst:.1e}",
        "allowed": "" if finding.allowed is None else f"{finding.allowed:.1e}",
        "launches": finding.launches or "",
        "status": finding.status,
    }
