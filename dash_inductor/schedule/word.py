"""A decision as one integer, which a graph with dynamic shapes computes and hands to the writer of the table.

    bits  0..2   family, an index of CODES
    bit   3      boustrophedon
    bits  4..13  heads in flight (G)
    bits 14..29  roles (A)
    bits 30..46  stride (0 unless the family is shift or shift_round_robin)

The low 30 bits fit an int32; the stride above them is also n_q // roles, with as many roles as a head has chains at most.
"""

from __future__ import annotations

from .families import FAMILIES, ROUND_ROBIN, TWO_PASS
from .times import Integer

CODES = (*FAMILIES, *ROUND_ROBIN, TWO_PASS)
FAMILY_SHIFT, FAMILY_BITS = 0, 3
BOUSTROPHEDON_SHIFT, BOUSTROPHEDON_BITS = 3, 1
HEADS_SHIFT, HEADS_BITS = 4, 10
ROLES_SHIFT, ROLES_BITS = 14, 16
STRIDE_SHIFT, STRIDE_BITS = 30, 17
WORD_BITS = 47


def encode(family: str, roles: Integer, heads_in_flight: Integer, stride: Integer, boustrophedon: bool) -> Integer:
    """The word of a decision, of ints or of symbolic integers.

    >>> encode("shift", 3, 2, 2, False), decode(encode("shift", 3, 2, 2, False))
    (2147532834, ('shift', 3, 2, 2, False))
    """
    constant = (CODES.index(family) << FAMILY_SHIFT) + (int(boustrophedon) << BOUSTROPHEDON_SHIFT)
    return constant + fields(roles, heads_in_flight, stride)


def fields(roles: Integer, heads_in_flight: Integer, stride: Integer) -> Integer:
    """The part of a word that holds numbers."""
    return heads_in_flight * 2**HEADS_SHIFT + roles * 2**ROLES_SHIFT + stride * 2**STRIDE_SHIFT


def decode(word: int) -> tuple[str, int, int, int, bool]:
    """(family, roles, heads in flight, stride, boustrophedon) of a word."""

    def field(shift: int, bits: int) -> int:
        return word >> shift & (1 << bits) - 1

    return (
        CODES[field(FAMILY_SHIFT, FAMILY_BITS)],
        field(ROLES_SHIFT, ROLES_BITS),
        field(HEADS_SHIFT, HEADS_BITS),
        field(STRIDE_SHIFT, STRIDE_BITS),
        bool(field(BOUSTROPHEDON_SHIFT, BOUSTROPHEDON_BITS)),
    )
