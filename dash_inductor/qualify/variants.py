"""Our kernels of one pass, changed for a measurement: their source is edited, tiles or a constant replaced, while they compile.

No setting of the package leads here: without waiting the gradients are wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from ..hooks import cache_key
from ..lowering import kernels
from ..templates import source as source_of
from ..templates import tiles
from ..templates.tiles import Fragments, Tile, padded

TEMPLATES = ("ONE_PASS", "BLOCK_MASK_ONE_PASS")  # of lowering/kernels.py


@dataclass(frozen=True)
class Variant:
    """`edit` changes the source of TEMPLATES; `tiles` takes the place of those of (sm, padded head dim), and
    `release_after` that of RELEASE_AFTER.
    """

    name: str
    says: str
    edit: Callable[[str], str] | None = None
    tiles: dict[tuple[int | str, int], Tile] = field(default_factory=dict)
    release_after: int | None = None
    valid: bool = True  # whether the gradients are right

    def changes(self, arch: int | str, head_dim: int) -> bool:
        """Whether anything is different on an architecture at a head dim."""
        return self.edit is not None or self.release_after is not None or (arch, max(64, padded(head_dim))) in self.tiles

    @property
    def digest(self) -> str:
        """What tells its generated code from that of others, for caches: the name, and what its edit makes of the source."""
        return hashlib.sha256("\n".join([self.name, *map(self.source, TEMPLATES)]).encode()).hexdigest()

    def source(self, template: str = "ONE_PASS") -> str:
        """That of a template as the variant has it."""
        whole = source_of(*getattr(kernels, f"{template}_PARTS"))
        return whole if self.edit is None else self.edit(whole)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """What is compiled inside is the variant; caches keep it apart from the kernel itself."""
        uuid, digest = cache_key.CacheKey.uuid, self.digest

        def salted(self_: Any) -> Any:
            return *uuid(self_), digest

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(cache_key.CacheKey, "uuid", salted))
            stack.enter_context(mock.patch.dict(tiles._TILES, self.tiles))  # type: ignore[arg-type]
            if self.release_after is not None:
                stack.enter_context(mock.patch.object(tiles, "RELEASE_AFTER", self.release_after))
            for template in TEMPLATES if self.edit is not None else ():
                stack.enter_context(mock.patch.object(kernels, template, self._template(template)))
            yield

    def _template(self, template: str) -> Any:
        """A template under a name of its own, which Inductor wants to be the only one."""
        name = f"{template.lower()}_{self.name.replace('-', '_')}"
        known = kernels.KernelTemplate.all_templates
        if f"dash_{name}" not in known:
            with mock.patch.object(kernels, "source", lambda *names: self.source(template)):
                return kernels._template(name)
        return known[f"dash_{name}"]


def without_order(source: str) -> str:
    """`wait` and `release` do nothing: the same arithmetic and additions, in whatever order they come, wrong where a rank 0 comes
    late. Raises ValueError if the source has not the one function of either name."""
    for name in ("wait", "release"):
        function = rf"(@triton\.jit\ndef {name}\([^)]*\):\n)(?:[ \t]+.*\n|\n(?=[ \t]))*"
        source, found = re.subn(function, r"\1    pass\n", source)
        if found != 1:
            raise ValueError(f"the kernel's template has {found} functions {name}, not one")
    return source


def staged(name: str, stages: int) -> Variant:
    """The tiles of the table with another number of stages."""
    changed = {key: replace(tile, num_stages=stages) for key, tile in tiles._TILES.items() if tile.num_stages != stages}
    return Variant(name, f"{stages} stages", tiles=changed)


UNORDERED = Variant("unordered", "without wait and release: what order costs; its gradients are wrong", without_order, valid=False)
VARIANTS = (
    UNORDERED,
    Variant("release-after-s", "release after the next step's s matmul", release_after=1),
    Variant("release-after-dv", "release after the next step's dv matmul", release_after=3),
    staged("two-stages", 2),
    staged("four-stages", 4),
    # Two CTAs per SM: half or a quarter of the tile, with one warpgroup. The accumulator of dq then has 64 rows a warpgroup
    # and as many columns as it is wide.
    Variant(
        "two-per-sm",
        "64/64 (d = 64) and 32/64 (d = 128), 4 warps, two CTAs per SM",
        tiles={
            (90, 64): Tile(64, 64, 64, 4, 3, False, Fragments(4, 64), atomic_add=True, ctas_per_sm=2),
            (90, 128): Tile(32, 64, 128, 4, 3, True, Fragments(4, 32), atomic_add=True, ctas_per_sm=2),
        },
    ),
    Variant(
        "half-q",
        "32/128 at d = 128, 8 warps",
        tiles={(90, 128): Tile(32, 128, 128, 8, 3, True, Fragments(8, 32), atomic_add=True)},
    ),
)
