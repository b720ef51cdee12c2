"""What is measured: a model of a library, made and called as its users do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

PLAIN, PADDED, PACKED, CHECKPOINTED = "plain", "padded", "packed", "ckpt"


class Call(NamedTuple):
    """A module, and what it is called with."""

    module: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Model:
    """One model in its cases; `make` builds it for one of them, with its inputs, on torch's default device.

    library: whose it is, and what has to be installed unless `needs` names another. better: the name of the same family with an
        implementation of attention of which more is rewritten, where the one that the library takes by itself is another.
    context: what it is built and called in.
    needs_values: whether its forward reads the values of tensors. Those of other models have none.
    """

    library: str
    name: str
    make: Callable[[str], Call]
    cases: tuple[str, ...] = (PLAIN,)
    better: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    needs: str = ""
    needs_values: bool = False
