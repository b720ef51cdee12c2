"""Each kind of test has a process of its own: Triton's interpreter is on or off for all of it."""

import gc
import logging
import os
from pathlib import Path

import pytest

# In this process and those that it starts, tensors are small, and waking a second thread takes milliseconds on busy cores. Of
# Inductor's C++, no dozen compilations ask what the CPU has, and none optimises.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_VEC_ISA_OK", "TORCHINDUCTOR_DEBUG_COMPILE"), "1")

INTERPRETED = "emulated"  # the folder that needs TRITON_INTERPRET=1
COMPILED = ("expect", "gpu", "ptx")  # the folders that need it unset
# Files of few tests that take long. They begin first: one that began last would keep one core busy and leave the others idle.
LONGEST = (
    "test_written.py",
    "test_captured.py",
    "test_options.py",
    "test_processes.py",
    "test_gates.py",
    "test_execute.py",
    "test_recipes.py",
    "test_by_hand.py",
    "test_explain.py",
    "test_distributed.py",
    "test_cubin.py",
    "test_gluon_cubin.py",
)
# Where a case takes seconds. `make test` runs the first case of a test there, of an emulated one the last too, and `make nightly`
# the others. Of a test that is marked `every_case`, `make test` runs all, and a case that is marked `quick` beside the first.
SLOW = (INTERPRETED, "expect", "ptx")


def folder_of(item: pytest.Item) -> str:
    """Of the tests: "unit", for example."""
    return Path(item.path).relative_to(Path(__file__).parent).parts[0]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreting = os.environ.get("TRITON_INTERPRET", "0") == "1"
    kinds = set(map(folder_of, items))
    wrong = kinds & set(COMPILED) if interpreting else kinds & {INTERPRETED}
    if wrong:
        raise pytest.UsageError(
            f"tests/{', tests/'.join(sorted(wrong))} cannot run with TRITON_INTERPRET={int(interpreting)}: "
            "run `make test`, which starts one pytest per kind"
        )
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if folder_of(item) in SLOW and not any(map(item.get_closest_marker, ("every_case", "nightly", "quick"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        for item in of_one_test[1 : -1 if interpreting else None]:
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    # pytest attaches its handlers to loggers that do not propagate, and torch writes a trace of each compilation to a handler.
    logging.getLogger("torch.__trace").propagate = True
    gc.freeze()  # what has been imported stays
    # Collections of garbage take 3 to 8 % of the time, and Dynamo asks for one in each compilation. A process of the night, which
    # compiles for an hour, grew by 16 GB without them.
    if "nightly" not in (session.config.option.markexpr, os.environ.get("HYPOTHESIS_PROFILE")):
        gc.disable()
