"""Each kind of test has a process of its own: Triton's interpreter is on or off for all of it."""

import os
from pathlib import Path

import pytest

INTERPRETED = "emulated"  # the folder that needs TRITON_INTERPRET=1
COMPILED = ("expect", "gpu")  # the folders that need it unset


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreting = os.environ.get("TRITON_INTERPRET", "0") == "1"
    kinds = {Path(item.path).relative_to(Path(__file__).parent).parts[0] for item in items}
    wrong = kinds & set(COMPILED) if interpreting else kinds & {INTERPRETED}
    if wrong:
        raise pytest.UsageError(
            f"tests/{', tests/'.join(sorted(wrong))} cannot run with TRITON_INTERPRET={int(interpreting)}: "
            "run `make test`, which starts one pytest per kind"
        )
