"""Functions that the command line is given by name."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any


def load(name: str) -> Callable[..., Any]:
    """The function called "package.module:function"; modules are looked for in the working folder, too.

    Raises:
        ValueError: there is none, or its module cannot be imported.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name!r} names no function: give package.module:function, such as train:step for step() of train.py")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = operator.attrgetter(function)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # what the module itself imports
            raise ValueError(f"importing {module} failed: {error}") from error
        raise ValueError(f"there is no module {error.name!r} here: run in the folder that has it, or install it") from None
    except AttributeError as error:
        raise ValueError(f"{module} has no function {function!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {module} failed: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name} is no function but of type {type(found).__name__}")
    return found  # type: ignore[no-any-return]
