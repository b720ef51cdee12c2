"""What a family of schedules is: an order, and what the choice, the table and the pictures have to know of it.

A family's own file (schedule/orders/) has its order and its record, and families.py a line for it. Nothing else lists families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from .formulas.formula import Formula  # which needs sympy
    from .orders.base import InPasses

Formulas: TypeAlias = "Mapping[tuple[str, str], Formula]"  # by name of a family, and mask


@dataclass(frozen=True)
class Family:
    """A way to order the steps of a head, for any number of roles (see `Order`).

    Attributes:
        name: as settings and reports have it.
        order: makes the order of a geometry and a number of roles.
        masks: those that it serves: "full", "causal".
        colour: its lines in charts.
        default_under: masks for which `auto` falls back on it.
        tried_under: masks for which `auto` tries it too, where bits may depend on the number of SMs.
        is_monotone: whether tiles add up in the order of KV tiles. Bits then depend on lengths and tile alone, and roles sweep the
            tiles together.
        mirrors_under: masks under which roles are mirrored in odd rounds, since chains differ in length.
        chains_of_unit: chains that a role takes at a time.
        roles_at_most_q_tiles: whether a head has no more roles than Q tiles.
        has_stride: whether roles start a number of Q tiles apart that can be chosen.
        on_device: whether templates/table.py.jinja writes its table, for sizes known at run time and for tables too large to be a
            constant.
        queue_of: for a round robin, which puts units of all heads in one queue: the family whose order it takes.
        formulas: makes the times in closed form of the families of its file; called when a choice is made, since sympy takes long
            to make formulas. What is not among them has no predicted time.
    """

    name: str
    order: Callable[..., InPasses]
    masks: tuple[str, ...]
    colour: str
    default_under: tuple[str, ...] = ()
    tried_under: tuple[str, ...] = ()
    is_monotone: bool = False
    mirrors_under: tuple[str, ...] = ()
    chains_of_unit: int = 1
    roles_at_most_q_tiles: bool = False
    has_stride: bool = False
    on_device: bool = False
    queue_of: str | None = None
    formulas: Callable[[], Formulas] = dict

    def units(self, n_kv: int) -> int:
        """How many units the chains of a head make.

        >>> from .orders.symmetric import SYMMETRIC
        >>> SYMMETRIC.units(5)
        3
        """
        return -(-n_kv // self.chains_of_unit)
