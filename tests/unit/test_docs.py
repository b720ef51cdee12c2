"""What pages, comments and docstrings cite stands in the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
TEXTS = [
    path for path in TRACKED if path.endswith((".md", ".py", ".jinja", ".toml")) and not path.startswith(("tests/", "benchmarks/"))
]
CITED = re.compile(r"(?<![\w/.-])((?:[\w.]+/)+[\w.]+\.(?:py\.jinja|py|md|sh|toml|csv|txt)|\w+\.md)\b")


def stands(path: str, beside: Path) -> bool:
    """From the root, from the package, from where it is cited, or as the end of a path."""
    return any((folder / path).exists() for folder in (ROOT, ROOT / "dash_inductor", beside)) or any(
        tracked.endswith(f"/{path}") for tracked in TRACKED
    )


@pytest.mark.parametrize("path", TEXTS)
def test_what_is_cited_is_there(path: str) -> None:
    text = (ROOT / path).read_text()
    assert [cited for cited in CITED.findall(text) if not stands(cited, (ROOT / path).parent)] == []


def test_the_page_of_models_has_every_family_and_case():
    """As the command that writes it knows them."""
    page = (ROOT / "docs" / "models.md").read_text()
    for name, family in FAMILIES.items():
        _, _, rest = page.partition(f"\n## {name}\n")
        lines = rest.partition("\n## ")[0].splitlines()
        cases = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("|")]
        assert cases == ["case", "---", *family.cases], name
