"""Triton sources of the kernels, and the tiles they run with.

Knows tiles and tables, no schedules, and imports nothing of the project.
"""

import functools
import importlib
import re
from importlib import resources
from types import ModuleType


def source(*names: str) -> str:
    """The Jinja source of the template `names[0]`, followed by the Triton functions of `names[1:]` that it calls.

    A generated kernel is one file: where a source imports functions of a module here, or includes a file of macros, it gets their
    text.
    """
    folder = resources.files(__name__)

    def functions(line: re.Match[str]) -> str:
        blocks = folder.joinpath(f"{line[1]}.py").read_text().rstrip().split("\n\n\n")
        return "\n\n\n".join(block for block in blocks if any(f"\ndef {name}(" in block for name in line[2].split(", ")))

    def read(name: str) -> str:
        return re.sub(r'{%- include "(\w+)" -%}\n', lambda line: read(line[1]), folder.joinpath(f"{name}.py.jinja").read_text())

    text = "\n\n".join(map(read, names))
    return re.sub(r"^from \.(\w+) import (.+)$", functions, text, flags=re.MULTILINE)


OLDEST, NEWEST = (3, 6), (3, 9)  # Tritons that the Gluon kernel is written for and tested with
TESTED = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


@functools.cache
def gluon_is_tested() -> bool:
    """Whether the Gluon kernel was tested as this Triton compiles it; True without a Triton, where nothing is compiled."""
    try:
        import triton
    except ImportError:
        return True
    major, minor = map(int, triton.__version__.split(".")[:2])
    return OLDEST <= (major, minor) <= NEWEST


def why_no_gluon() -> str:
    """What is said where it was not.

    >>> why_no_gluon().partition(" is")[2]
    ' outside of 3.6 to 3.9, with which the Gluon kernel was tested'
    """
    import triton

    return f"Triton {triton.__version__} is outside of {TESTED}, with which the Gluon kernel was tested"


def gluon_kernel() -> ModuleType:
    """The module of the Gluon kernel's launch: `sdpa_backward` and `arguments`.

    Raises:
        ValueError: where Triton's Gluon is not as in the versions that the kernel is written for.
    """
    import triton  # lazily: tiles need none

    try:
        return importlib.import_module(".gluon.launch", __name__)
    except (ImportError, AttributeError) as missing:
        written = f"the Gluon kernel is written for Triton {TESTED}"
        raise ValueError(f"{written}, this is {triton.__version__}: {missing}") from missing
