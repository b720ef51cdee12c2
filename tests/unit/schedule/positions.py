"""Functions of kernels that compute with integers alone, as Python: their source runs as it stands, without Triton."""

from __future__ import annotations

import re
from importlib import resources
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

tl = SimpleNamespace(constexpr=None, where=np.where, minimum=np.minimum, maximum=np.maximum)
triton = SimpleNamespace(jit=lambda function: function)


def as_python(*files: str, **names: Any) -> SimpleNamespace:
    """What files of templates/ define, one after the other; `names` stand in for what they import."""
    folder = resources.files("dash_inductor.templates")
    text = "\n".join(folder.joinpath(name).read_text() for name in files)
    scope = {"__name__": files[-1], "triton": triton, "tl": tl, "Any": Any, "NamedTuple": NamedTuple, **names}
    exec(compile(re.sub(r"^(from|import) .*\n", "", text, flags=re.MULTILINE), files[-1], "exec"), scope)
    return SimpleNamespace(**scope)
