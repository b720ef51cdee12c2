"""Triton sources of the kernels, and the tiles they run with.

Knows tiles and tables, no schedules, and imports nothing of the project.
"""

from importlib import resources


def source(*names: str) -> str:
    """The Jinja source of the template `names[0]`, followed by the Triton functions of `names[1:]` that it calls."""
    folder = resources.files(__name__)
    return "\n\n".join(folder.joinpath(f"{name}.py.jinja").read_text() for name in names)
