"""Applies each mutant of mutants.toml to a copy of the repository, and runs the one test that must fail for it.

`python tests/mutants` takes all of them, `python tests/mutants WORDS...` those whose name or file has one of the words. Before a
mutant, its test must pass in the copy as it is. Exits with 1 if a mutant survives, or if a test fails without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ("dash_inductor", "lowering", "templates", "tests", "benchmarks", "docs", "pyproject.toml")
FAILED = 1  # pytest's exit status of a test that fails; others say that it did not come to that
MOST_SECONDS = 600
WORKERS = 2  # copies, in each of which one mutant at a time is tried


def mutants() -> list[dict[str, str]]:
    """name, file, old, new and test of each."""
    return tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))["mutant"]


def run(tests: list[str], copy: Path) -> tuple[int, str]:
    """pytest's exit status, and what it printed, of tests of one kind, with the packages of the copy and empty caches."""
    left_out = ("DASH_INDUCTOR", "TORCHINDUCTOR", "TRITON", "HYPOTHESIS", "PYTEST")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    if tests[0].startswith("tests/emulated/"):
        environ["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as caches:
        # Bytecode knows its source by size and second: a mutant may have those of the file before it.
        environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": caches}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", "", *tests]
        try:
            done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return -1, f"no end within {MOST_SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def main(words: list[str]) -> int:
    chosen = [each for each in mutants() if not words or any(word in each["name"] + each["file"] for word in words)]
    if not chosen:
        print(f"no mutant has {' or '.join(words)} in its name or file", file=sys.stderr)
        return 2
    copies = SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        for copy in (Path(folder, str(number)) for number in range(WORKERS)):
            make_copy(copy)
            copies.put(copy)

        def in_a_copy(work: Callable[[Path], Any]) -> Any:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        tests = dict.fromkeys(each["test"] for each in chosen)
        kinds = [[test for test in tests if test.startswith("tests/emulated/") == emulated] for emulated in (False, True)]
        unbroken = [pool.submit(in_a_copy, partial(run, kind)) for kind in kinds if kind]
        for kind, (status, output) in zip(filter(None, kinds), (each.result() for each in unbroken), strict=True):
            if status != 0:
                print(f"{output}\nthese tests fail without a mutant: {' '.join(kind)}", file=sys.stderr)
                return 1
        print(f"{'mutant':58}  {'file':36}  {'seconds':>7}  killed by", flush=True)
        judged = pool.map(in_a_copy, (partial(killed, each) for each in chosen))
        survivors = [each["name"] for each, was_killed in zip(chosen, judged, strict=True) if not was_killed]
    print(f"{len(chosen)} mutants, {len(survivors)} survived{': ' if survivors else ''}{', '.join(survivors)}")
    return 1 if survivors else 0


def make_copy(copy: Path) -> None:
    """Writes what the tests read."""
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():  # in a clone that is not installed the package has links to its other folders
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(source, copy)


def killed(mutant: dict[str, str], copy: Path) -> bool:
    """Whether the mutant's test fails for it; prints its row of the table."""
    file = copy / mutant["file"]
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant["old"]) == 1, mutant
    file.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    begin = time.monotonic()
    status, output = run([mutant["test"]], copy)
    seconds = time.monotonic() - begin
    file.write_text(text, encoding="utf-8")
    by = mutant["test"] if status == FAILED else f"NOBODY: pytest ends with {status}: {mutant['test']}"
    print(f"{mutant['name']:58}  {mutant['file']:36}  {seconds:7.1f}  {by}", flush=True)
    if status not in (0, FAILED):
        print(output, file=sys.stderr)
    return status == FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
