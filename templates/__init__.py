"""Triton sources of the kernels, and the tiles they run with.

Knows tiles and tables, no schedules, and imports nothing of the project.
"""

import importlib
from importlib import resources
from types import ModuleType


def source(*names: str) -> str:
    """The Jinja source of the template `names[0]`, followed by the Triton functions of `names[1:]` that it calls."""
    folder = resources.files(__name__)
    return "\n\n".join(folder.joinpath(f"{name}.py.jinja").read_text() for name in names)


def gluon_kernel() -> ModuleType:
    """The module of the Gluon kernel's launch: `sdpa_backward` and `arguments`.

    Raises:
        ValueError: where Triton's Gluon is not as in the versions that the kernel is written for.
    """
    import triton  # lazily: tiles need none

    try:
        return importlib.import_module(".gluon.launch", __name__)
    except (ImportError, AttributeError) as missing:
        raise ValueError(f"the Gluon kernel is written for Triton 3.6 to 3.9, this is {triton.__version__}: {missing}") from missing
