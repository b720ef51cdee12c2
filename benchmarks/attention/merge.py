"""Makes one folder and a report of several that `python -m dash_inductor qualify --full --out` has written on one kind of GPU.

    python -m benchmarks.attention.merge FOLDER... --out DIR

DIR gets kernels.jsonl, attention.csv, red_throughput.csv, timings.jsonl, costs.toml (fitted to the timings of all folders), the
other tables that a folder has, summary.txt, pictures and report.md.
Folders of different GPUs, versions or sources are refused, and so are two measurements of the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from dash_inductor.first_use.machine import sources_digest
from dash_inductor.qualify import additions as of_l2
from dash_inductor.qualify import costs as calibrated
from dash_inductor.qualify import environment, kernel_times, kernels, marks, profiler, rows, runner, schedules, training
from dash_inductor.qualify.costs import COSTS, TIMINGS
from dash_inductor.qualify.stages import SUMMARY

from . import report_md, table
from .plot import plot

REPORT = "report.md"
OVERLAPS = "overlaps.csv"  # whose module needs a Triton that has Gluon
ONCE = (  # one folder has it, and it stays as it is
    *(kernels.FILE, of_l2.FILE, schedules.FILE, kernel_times.FILE, marks.FILE, OVERLAPS, training.FILE),
    *(profiler.SAMPLES, profiler.ACCOUNT),
)
SAME = ("gpu", "arch", "sms", "l2_bytes", "torch", "triton", "sources")
NOT_RUN = "not run: "


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for folders that are none, or that contradict each other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.merge", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="written anew, files of these names are replaced")
    args = parser.parse_args(argv)
    try:
        merge(args.folders, args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"written: {args.out}")
    return 0


def merge(folders: Sequence[Path], out: Path) -> None:
    """Writes all into a folder; ValueError, naming the folders, for what does not go together."""
    if len({folder.name for folder in folders}) < len(folders):
        raise ValueError(f"folders must have different names, not {', '.join(folder.name for folder in folders)}")
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise ValueError(f"{out} is one of the folders that are merged: name another one by --out")
    environments = {folder: environment_of(folder) for folder in folders}
    agree(environments)
    cells = merged_rows(folders, environments)
    measured = table.typed(cells.to_dict("records"))
    once = {name: path for name in ONCE if (path := only_one(folders, name))}
    findings = kernels.read(once[kernels.FILE].parent) if kernels.FILE in once else []
    additions = None
    if of_l2.FILE in once:
        additions = pd.read_csv(once[of_l2.FILE], usecols=[each.name for each in fields(of_l2.Addition)])
    timings = merged_timings(folders)
    costs = None if timings is None else merged_costs(folders, *timings)
    summary = "".join(f"{folder.name}:\n{(folder / SUMMARY).read_text(encoding='utf-8')}" for folder in folders)
    if measured.empty and additions is None and timings is None:
        raise ValueError(f"nothing was measured in {', '.join(map(str, folders))}")

    each = {folder.name: found for folder, found in environments.items()}
    texts = {
        SUMMARY: summary,
        environment.FILE: json.dumps(each, indent=2) + "\n",
        COSTS: costs,
        REPORT: report_md.report(
            findings=findings, environments=each, summary=summary, rows=measured, additions=additions, costs=costs
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name in (runner.FILE, TIMINGS, COSTS, *ONCE):  # of an earlier merge
        (out / name).unlink(missing_ok=True)
    for name, text in texts.items():
        if text is not None:
            (out / name).write_text(text, encoding="utf-8")
    for name, path in once.items():
        (out / name).write_bytes(path.read_bytes())
    if len(measured):
        cells.to_csv(out / runner.FILE, index=False, lineterminator="\n")
        timed = measured[(measured["status"] == rows.OK) & measured["median_ms"].notna()]
        timed = timed.sort_values("run", key=lambda runs: runs != "table", kind="stable")
        plot(timed.drop_duplicates(["shape", "contender"]), out)  # a point of the table, else of what other run has it
    if timings is not None:
        for launch, ns in timings[1].items():
            calibrated.keep(out / TIMINGS, timings[0], launch, ns)


def environment_of(folder: Path) -> dict[str, Any]:
    """What a run wrote first; ValueError for a folder of nothing like it."""
    for name in (environment.FILE, SUMMARY):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: it is no folder of `qualify --full --out`")
    found = json.loads((folder / environment.FILE).read_text(encoding="utf-8"))
    missing = [name for name in SAME if name not in found]
    if missing:
        raise ValueError(f"{folder / environment.FILE} does not say {', '.join(missing)}")
    return found


def agree(environments: Mapping[Path, Mapping[str, Any]]) -> None:
    """ValueError if something differs that times depend on; the driver may, and the report says it."""
    first, *others = environments
    for other in others:
        for name in SAME:
            one, two = environments[first][name], environments[other][name]
            if one != two:
                raise ValueError(f"{first} and {other} do not go together: {name} is {one} and {two}")


def merged_rows(folders: Sequence[Path], environments: Mapping[Path, Mapping[str, Any]]) -> pd.DataFrame:
    """The text of all rows, each run's together; one that was not run gives way to one that was. ValueError where two were."""
    found = [pd.DataFrame(columns=[*rows.NAMES, "path"], dtype="string")]
    for path in (folder / runner.FILE for folder in folders if (folder / runner.FILE).exists()):
        own_rows = pd.DataFrame(rows.read_cells(path), columns=rows.NAMES, dtype="string").assign(path=str(path))
        for name in ("gpu", "sms", "torch", "triton"):
            own = str(environments[path.parent][name])
            for other in own_rows.loc[own_rows[name] != own, name].head(1):
                raise ValueError(f"{path} has rows of {name} {other}, and the folder is of {own}")
        found.append(own_rows)
    every, key = pd.concat(found, ignore_index=True), ["run", "shape", "contender"]
    every["waits"] = every["status"].str.startswith(NOT_RUN)
    every["of_run"], every["place"] = (every.groupby(columns, sort=False).ngroup() for columns in ("run", key))
    measured = every[~every["waits"]]
    for _, rival in measured[measured.duplicated(key)].head(1).iterrows():
        (path, *_) = measured.loc[measured["place"] == rival["place"], "path"]
        what = f"{rival['contender']} at {rival['shape']} of run {rival['run']!r}"
        raise ValueError(f"{what} was measured twice, in {path} and {rival['path']}")
    return every.sort_values("waits", kind="stable").drop_duplicates(key).sort_values(["of_run", "place"])[rows.NAMES]


def only_one(folders: Sequence[Path], name: str) -> Path | None:
    """The file of this name; ValueError if several folders have one."""
    paths = [folder / name for folder in folders if (folder / name).exists()]
    if len(paths) > 1:
        raise ValueError(f"measured twice: {' and '.join(map(str, paths))}")
    return paths[0] if paths else None


def merged_timings(folders: Sequence[Path]) -> tuple[calibrated.Session, dict[calibrated.Launch, float]] | None:
    """The launches of all; ValueError if one was measured twice, or on different GPUs."""
    session: calibrated.Session | None = None
    launches: dict[calibrated.Launch, float] = {}
    for path in (folder / TIMINGS for folder in folders if (folder / TIMINGS).exists()):
        found, own = calibrated.read_timings(path)
        if session not in (None, found):
            raise ValueError(f"{path} holds timings of another GPU, or of other kernels, than those before it")
        if launches.keys() & own.keys():
            raise ValueError(f"{path} holds timings of launches that another folder has as well")
        session = found
        launches |= own
    return None if session is None else (session, launches)


def merged_costs(folders: Sequence[Path], session: calibrated.Session, launches: Mapping[calibrated.Launch, float]) -> str | None:
    """The cost file of the one folder that has timings; of several, one fitted to all, by the tiles of the run."""
    having = [folder for folder in folders if (folder / TIMINGS).exists()]
    if len(having) == 1:
        path = having[0] / COSTS
        return path.read_text(encoding="utf-8") if path.exists() else None
    if session.sources != sources_digest():
        raise ValueError(
            f"{' and '.join(map(str, having))} have timings of other sources than these: merge them where they were measured"
        )
    fitted, _ = calibrated.fits(launches, session)
    return calibrated.cost_file(session, fitted) if fitted else None


if __name__ == "__main__":
    sys.exit(main())
