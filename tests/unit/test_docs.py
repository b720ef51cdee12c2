"""What pages and comments cite stands in the repository; the site builds without a warning, and its links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import dash_inductor
from benchmarks.kept import of_newest_torch, rows_of
from benchmarks.models.families import FAMILIES
from dash_inductor.config import CHOICES, Config
from dash_inductor.devices import DEVICES
from docs import words
from docs.generate import blocks, conformance, formulas, results
from docs.generate.pictures import PICTURES, path_of

ROOT = Path(__file__).parents[2]
SLOW = ("start.md", "commands.md", "performance.md")  # pages that take many seconds to write
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
TEXTS = [
    path for path in TRACKED if path.endswith((".md", ".py", ".jinja", ".toml")) and not path.startswith(("tests/", "benchmarks/"))
]
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
CITED = re.compile(r"(?<![\w/.-])((?:[\w.]+/)+[\w.]+\.(?:py\.jinja|py|md|sh|toml|csv|txt)|\w+\.md)\b")


def stands(path: str, beside: Path) -> bool:
    """From the root, from the package, from where it is cited, or as the end of a path."""
    return any((folder / path).exists() for folder in (ROOT, ROOT / "dash_inductor", beside)) or any(
        tracked.endswith(f"/{path}") for tracked in TRACKED
    )


@pytest.mark.parametrize("path", TEXTS)
def test_tests_that_are_named_exist(path: str) -> None:
    for file, name in NAMED.findall((ROOT / path).read_text()):
        functions = (node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef))
        assert name in functions, f"{file}::{name}"


@pytest.mark.parametrize("path", TEXTS)
def test_what_is_cited_is_there(path: str) -> None:
    text = (ROOT / path).read_text()
    assert [cited for cited in CITED.findall(text) if not stands(cited, (ROOT / path).parent)] == []


def test_the_results_of_models_have_every_family_and_case():
    """As the command that keeps them knows them."""
    kept = [(row["family"], row["case"]) for row in rows_of(of_newest_torch("models"))]
    assert kept == [(name, case) for name, family in FAMILIES.items() for case in family.cases]


def test_the_page_of_settings_has_every_setting_and_value():
    page = (ROOT / "docs" / "settings.md").read_text()
    table = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    rows = {line.split(" | ")[0].removeprefix("| ").strip("`"): line for line in table}
    assert {field.name for field in fields(Config)} - {"enabled"} == set(rows)
    for name, values in CHOICES.items():
        text = page if name == "schedule" else rows[name]
        assert all(f"`{value}`" in text for value in values), name


def test_words_by_hand_have_a_limit():
    """Of all pages, and of the first: `make docs-check` also looks at its first two screens."""
    counted = words.counts()
    assert sum(counted.values()) <= words.LIMIT and counted["README.md"] <= 750
    assert doctest.testmod(words).failed == 0


SAYS_WHAT_RAN = re.compile(r"\b(has|have|never|not) (yet )?(run|been run|been timed|timed) on|never run|for ten minutes|on one GPU")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in blocks.pages()])
def test_what_has_run_is_said_by_a_block_alone(page: Path) -> None:
    """So that no sentence contradicts it."""
    assert [match[0] for match in SAYS_WHAT_RAN.finditer(blocks.BLOCK.sub("", page.read_text()))] == []


def test_that_every_gpu_and_kernel_has_a_state() -> None:
    rows = [line.strip("| ").split(" | ") for line in results.ran("").splitlines() if line.startswith("| ")]
    head, _, *gpus = rows
    assert head == ["GPU", *results.KERNELS] and len(gpus) == len(DEVICES) + 1
    known = ("timed: ", "ran: ", "executed", "unverified", "not made for it")
    assert all(cell.startswith(known) for _, *cells in gpus for cell in cells)
    h200 = next(row for row in gpus if row[0] == "H200")
    assert "full and causal 64 and 128 in bf16" in h200[1] and "timed: " in h200[2] and h200[3].startswith("ran: ")


def test_no_cell_of_a_level_claims_more_than_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no GPU ran is not measured, and what nobody executed is not executed; what is stronger than `run` is never measured."""

    def cells() -> dict[tuple[str, str, str], list[str]]:
        rows = [line.strip("| ").split(" | ") for line in conformance.levels("").splitlines() if line.startswith("| ")][2:]
        return {(kernel, dtype, level.strip("`")): words for kernel, dtype, level, *words in rows}

    known, gpus = cells(), list(DEVICES)
    h200, a100 = gpus.index("h200"), gpus.index("a100")
    assert known["one pass, Gluon", "bf16", "run"][h200] == "measured"
    assert known["one pass, Gluon", "fp16", "run"][h200] == "executed"
    assert known["one pass, Gluon", "bf16", "run"][a100] == "declined"
    assert all("measured" not in words for (_, _, level), words in known.items() if level != "run")
    monkeypatch.setattr(results, "tried", dict)
    assert known["one pass, Triton", "bf16", "run"][h200] == "measured" and all(
        "measured" not in words for words in cells().values()
    )
    monkeypatch.setattr(results, "never_bad", set)
    assert {*cells()["one pass, Triton", "bf16", "run"]} == {"unverified"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.nightly] * (page.name in SLOW), id=page.name) for page in blocks.pages()]
)
def test_generated_blocks_are_what_the_code_says(page: Path) -> None:
    text = page.read_text()
    assert blocks.written(text) == text, "python -m docs.generate writes it anew"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_code_draws(name: str) -> None:
    assert path_of(name).read_text() == PICTURES[name](), "python -m docs.generate draws it anew"


def test_examples_of_formulas() -> None:
    results = doctest.testmod(formulas)
    assert results.attempted and not results.failed


class Links(HTMLParser):
    """Of one page: ids, where its links lead, and images without a text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.without_text: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids.add(named.get("id") or "")
        self.links |= {named.get(name) or "" for name in ("href", "src")} - {""}
        if (tag == "img" and not named.get("alt")) or (named.get("role") == "img" and not named.get("aria-label")):
            self.without_text.append(str(named))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="pip install 'dash-inductor[docs]'")
    folder = tmp_path_factory.mktemp("site")
    arguments = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--doctree-dir", str(folder / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments, "docs", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.mark.nightly
def test_the_site_has_every_page(site: Path) -> None:
    built = {path.stem for path in site.glob("*.html")}
    assert built & {"rfc"} == set()  # a text for PyTorch's issue tracker
    assert built >= {path.stem for path in (ROOT / "docs").glob("*.md")} - {"rfc"}


@pytest.mark.nightly
def test_the_api_page_has_every_public_name(site: Path) -> None:
    ids = Links(site / "api.html").ids
    assert {f"dash_inductor.{name}" for name in dash_inductor.__all__} <= ids


@pytest.mark.nightly
def test_the_api_page_takes_prose_for_no_type(site: Path) -> None:
    """Of properties, whose docstrings are sentences, and of two fields that share a text."""
    page = (site / "api.html").read_text()
    assert ">Type<" not in page
    assert {"roles", "heads_in_flight"} <= set(re.findall(r"<strong>(\w+)</strong>", page))


@pytest.mark.nightly
def test_links_lead_somewhere(site: Path) -> None:
    """Anchors included; of other sites nothing is asked."""
    pages = {path.name: Links(path) for path in site.glob("*.html")}
    for name, page in pages.items():
        assert page.without_text == [], name
        for link in map(urlsplit, page.links):
            if link.scheme:
                continue
            target = link.path or name
            assert (site / target).exists(), (name, link)
            assert not link.fragment or target not in pages or link.fragment in pages[target].ids, (name, link)
