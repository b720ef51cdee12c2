"""The tests that are too long for every change, two commands at a time, and a table of what they tried: `make nightly`.

`python tests/nightly` runs all parts, `python tests/nightly WORDS...` those whose name has one of the words. What pytest prints
goes into a file per part under build/nightly; what failed is printed too. What a part that passed came to is kept in
benchmarks/results/nightly, and the part is not run again on the same sources: a run goes on where the last one stopped, on another
machine too once that is committed. Pages are no sources. Exits with 1 if one fails, or none ran.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "nightly"
KEPT = ROOT / "benchmarks" / "results" / "nightly"
SOURCES, RESULTS = ("dash_inductor", "lowering", "templates", "tests", "benchmarks", "pyproject.toml"), "benchmarks/results"
EMULATED = {"TRITON_INTERPRET": "1"}
MANY = {"HYPOTHESIS_PROFILE": "nightly"}
# By name, the longest first: pytest's arguments, whose files may be patterns, and variables.
PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "other emulated": ("-m nightly tests/emulated", EMULATED),
    "models": ("-m nightly tests/emulated/test_models.py tests/emulated/test_transformers.py", EMULATED),
    "functions": ("-m nightly tests/emulated/test_flex*.py tests/emulated/test_captured.py", EMULATED),
    "gathered keys": ("-m nightly tests/emulated/test_gathered_keys.py tests/emulated/test_context_parallel.py", EMULATED),
    "random options": ("tests/emulated/test_options.py", EMULATED | MANY),
    "weakened, Gluon": ("-m nightly tests/ptx/test_execute.py -k Gluon", {}),
    "weakened, Triton": ("-m nightly tests/ptx/test_execute.py -k 'not Gluon'", {}),
    "executed PTX": ("-m nightly tests/ptx", {}),
    "compiled": ("-m nightly tests/expect", {}),
    "unit": ("-m nightly tests/unit", {}),
    "interleavings": ("-m nightly tests/emulated/test_interleavings.py tests/emulated/test_every_interleaving.py", EMULATED),
    "written": ("tests/emulated/test_written.py", EMULATED | MANY),
    "errors": ("-m nightly tests/emulated/test_numerics.py", EMULATED),
    "schedules and masks": ("tests/unit/schedule tests/unit/test_mask_function.py", MANY),
    "processes": ("-m nightly tests/emulated/test_distributed.py tests/emulated/test_caches.py", EMULATED),
    "soak": ("-m nightly tests/emulated/test_soak.py", EMULATED),
}


def sources() -> str:
    """A digest of what is committed of SOURCES, with "-dirty" where something else is there, or nothing says what is."""
    files = [line for line in _git("ls-tree", "-r", "HEAD", "--", *SOURCES).splitlines() if f"\t{RESULTS}/" not in line]
    changed = not files or _git("status", "--porcelain", "--", *SOURCES, f":!{RESULTS}")
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:12] + "-dirty" * bool(changed)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def files_of(name: str) -> list[str]:
    """A part's test files: those that fit its patterns, and those of its folders that fit no pattern of a part. A pattern that no
    file fits stays, for pytest to refuse."""
    patterns = {word: sorted(ROOT.glob(word)) for other, _ in PARTS.values() for word in other.split() if word.endswith(".py")}
    fitting = {path for paths in patterns.values() for path in paths}
    found: list[Path] = []
    for word in PARTS[name][0].split():
        found += patterns.get(word) or ([ROOT / word] if word in patterns else [])
        found += sorted({*(ROOT / word).rglob("test_*.py")} - fitting) if _is_folder(word) else []
    return [str(path.relative_to(ROOT)) for path in found]


def _is_folder(word: str) -> bool:
    return (ROOT / word).is_dir()


def run(name: str) -> tuple[Counter[str], Counter[str], float]:
    """Tests by outcome, what tests that passed counted by record_property, and seconds, of a part."""
    arguments, variables = PARTS[name]
    files = files_of(name)
    at = sources()
    file_name = name.replace(" ", "_")
    kept = KEPT / f"{file_name}.json"
    if kept.exists():
        of, outcomes, counts, seconds = json.loads(kept.read_text())
        if of == at:
            return Counter(outcomes), Counter(counts), seconds
    log, results = (LOGS / f"{file_name}{suffix}" for suffix in (".txt", ".xml"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--show-capture=no", "--tb=short", f"--junitxml={results}"]
    options = (word for word in shlex.split(arguments) if not word.endswith(".py") and not _is_folder(word))
    command += ["-o", "junit_family=xunit1", *options, *files]
    results.unlink(missing_ok=True)  # of an earlier run
    begin = time.monotonic()
    with open(log, "w") as output:
        status = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT).returncode
    seconds = time.monotonic() - begin
    outcomes, counts = Counter[str](), Counter[str]()
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        failed = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), None)
        outcomes[failed or "passed"] += 1
        if failed is None:
            properties = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
            counts.update({name: int(value) for name, value in properties.items() if value.isdigit()})  # hypothesis has texts
    if status:
        print(f"{log.read_text()}\n{name}: pytest ended with {status}", file=sys.stderr, flush=True)
        outcomes["failure"] += outcomes.total() == 0  # it did not come to a test
    elif at == sources() and not at.endswith("-dirty"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([at, outcomes, counts, seconds]) + "\n")
    return outcomes, counts, seconds


def main(words: list[str]) -> int:
    chosen = [name for name in PARTS if not words or any(word in name for word in words)]
    if not chosen:
        print(f"no part has {' or '.join(words)} in its name; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(chosen, pool.map(run, chosen), strict=True))
    print(f"{'part':20}  {'passed':>6}  {'failed':>6}  {'skipped':>7}  {'minutes':>7}")
    for name, (outcomes, _, seconds) in results.items():
        failed = outcomes["failure"] + outcomes["error"]
        print(f"{name:20}  {outcomes['passed']:6}  {failed:6}  {outcomes['skipped']:7}  {seconds / 60:7.1f}")
    for name, (_, counts, _) in results.items():
        print(*(f"{name}: {count:,} {counted}" for counted, count in sorted(counts.items())), sep="\n", end="\n" * bool(counts))
    minutes = sum(seconds for _, _, seconds in results.values()) / 60
    print(f"at {_git('describe', '--always', '--dirty')}: {minutes:.0f} minutes of a core")
    return int(any(outcomes["failure"] + outcomes["error"] or not outcomes["passed"] for outcomes, _, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
