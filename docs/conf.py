"""The site: pages in Markdown, set by Sphinx. Formulas become MathML, and no page loads anything from elsewhere."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

import dash_inductor  # noqa: E402

project = "dash-inductor"
author = "the authors of dash-inductor"
version = release = dash_inductor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md"]
exclude_patterns = ["rfc.md"]  # a text for PyTorch's issue tracker
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
highlight_language = "none"
default_role = "code"  # docstrings write `name`
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_use_index = html_domain_indices = False
html_math_renderer = "mathml"


def math(latex: str, display: str) -> str:
    """MathML, which browsers set themselves; ValueError for LaTeX that the converter would leave as it is."""
    mathml = str(latex2mathml.converter.convert(latex, display=display))
    if "\\" in mathml or "<mi>&</mi>" in mathml:
        raise ValueError(f"latex2mathml does not know all of {latex}")
    return mathml


def visit_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(math(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_math_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{math(node.astext(), "block")}</div>')
    raise nodes.SkipNode


class InlinePictures(SphinxPostTransform):
    """Drawings take the colours of the page: as an <img> they could not know which theme the reader chose."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].endswith(".svg"):
                picture = (DOCS / image["uri"]).read_text()
                box = f'<div class="picture" role="img" tabindex="0" aria-label="{escape(image["alt"])}">{picture}</div>'
                image.replace_self(nodes.raw("", box, format="html"))


def add_recipes(_app: Sphinx, page: str, source: list[str]) -> None:
    """Every file of docs/recipes/ at the end of the page of recipes: its docstring as text, and its code."""
    for path in sorted((DOCS / "recipes").glob("*.py")) if page == "recipes" else ():
        tree = ast.parse(path.read_text())
        code = f"```{{literalinclude}} recipes/{path.name}\n:language: python\n:lines: {tree.body[1].lineno}-\n```"
        closed = f"<details><summary>The script</summary>\n\n{code}\n\n</details>"  # eight of them are eighteen screens
        source[0] += f"\n## `{path.name}`\n\n{ast.get_docstring(tree)}\n\n{closed}\n"


def mend_fields(_app: Sphinx, what: str, _name: str, documented: Any, _options: Any, lines: list[str]) -> None:
    """After Napoleon, which takes a property's prose before a colon for its type, and of "a, b: text" a for the type of b."""
    if what == "property":
        lines[:] = (inspect.getdoc(documented) or "").splitlines()
    for index, line in reversed(list(enumerate(lines))):
        if field := re.match(r":(ivar|param) (\w+), (\w+):", line):
            kind, first, second = field.groups()
            lines[index] = line.replace(f"{first}, {second}", first, 1)
            end = next((later for later in range(index + 1, len(lines)) if not lines[later].startswith(" ")), len(lines))
            lines.insert(end, f":{kind} {second}: see `{first}`")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.add_post_transform(InlinePictures)
    app.connect("source-read", add_recipes)
    app.connect("autodoc-process-docstring", mend_fields, priority=600)  # Napoleon has 500
