#!/usr/bin/env python3
"""Says why this checkout must not be published under a tag, such as v0.1.1, a line for each reason; the exit status is 1 then.

Building needs none of this: `make dist` asks only where PUBLISH names the tag.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLACEHOLDER = re.compile(r"PLACEHOLDER|\.invalid\b")  # no host ends with .invalid, by RFC 2606


def reasons(root: Path, tag: str) -> list[str]:
    """What is wrong with the metadata of the checkout at `root`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = [
        f"pyproject.toml: {field} is a placeholder ({text}): write the real one"
        for field in ("authors", "urls")
        for text in texts(project.get(field, f"PLACEHOLDER: {field} is missing"))
        if PLACEHOLDER.search(text)
    ]
    version = re.search(r'^__version__ = "(.+)"', (root / "dash_inductor" / "__init__.py").read_text(), re.MULTILINE)
    if version is None or tag != f"v{version[1]}":
        found.append(f"the tag {tag} is not v{version and version[1]}, the version of dash_inductor/__init__.py: tag that")
    if version is not None and f"## {version[1]}" not in (root / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section {version[1]}: give what is unreleased that heading, and its date")
    return found


def texts(value: Any) -> list[str]:
    """Every text in a value of TOML."""
    if isinstance(value, str):
        return [value]
    return [text for each in (value.values() if isinstance(value, dict) else value) for text in texts(each)]


if __name__ == "__main__":
    said = reasons(ROOT, *sys.argv[1:2] or ["(none)"])
    print("\n".join(said) if said else "Nothing keeps this from being published.", file=sys.stderr)
    sys.exit(bool(said))
