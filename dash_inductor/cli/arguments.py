"""Arguments that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

MOST = 2**31 - 1  # of each size


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: an int of at least `least`, and at most `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return parse


def device(known: Sequence[str]) -> Callable[[str], str]:
    """An argparse type: a GPU by name, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in known:
            raise argparse.ArgumentTypeError(f"there is no cost file for {text!r}; take one of {', '.join(known)}")
        return text.lower()

    return parse


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, of every command."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_attention(parser: argparse.ArgumentParser, *, devices: Sequence[str], masks: Sequence[str], dtypes: Sequence[str]) -> None:
    """An attention, and the GPU that it is for."""
    of_devices = f"the GPU, which need not be there: {', '.join(devices)}"
    parser.add_argument("--device", required=True, type=device(devices), metavar="GPU", help=of_devices)
    for name, meaning in (
        ("q-len", "queries of a sequence"),
        ("kv-len", "keys of a sequence"),
        ("batch", "sequences"),
        ("heads", "query heads"),
        ("head-dim", "elements of a query, and of a key"),
    ):
        parser.add_argument(f"--{name}", required=True, type=at_least(1, MOST), metavar="N", help=meaning)
    parser.add_argument(
        "--value-dim", type=at_least(1, MOST), metavar="N", help="elements of a value (default: as many as --head-dim)"
    )
    parser.add_argument("--kv-heads", type=at_least(1, MOST), metavar="N", help="key and value heads (default: as many as --heads)")
    parser.add_argument("--mask", default="full", choices=masks, help="which keys a query sees (default full: all)")
    parser.add_argument("--dtype", default="bf16", choices=dtypes, help="of query, key and value (default bf16)")
