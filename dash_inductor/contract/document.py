"""The manifest of a training process: JSON of what decides its bits, the same bytes for equal runs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..devices.target import own_device
from ..text import digest
from . import graphs
from .facts import of_attention, of_the_rest

VERSION = 1
MOST_BYTES = 1 << 28  # of a file that is read
# By key of a manifest, and of a graph in it, of what type the value is.
PARTS: dict[str, type] = {"version": int, "attention": dict, "rest": dict, "graphs": list, "choices": dict}
PARTS_OF_GRAPH: dict[str, type] = {"graph": str, "joint": str, "code": str, "guards": list, "attentions": list}


class ManifestFileError(ValueError):
    """What is no manifest that can be read: of another version, cut off, or edited by hand."""


@dataclass(frozen=True)
class Manifest:
    """What decides the bits of a training process.

    Attributes:
        attention: facts on which the bits of attention may hang: sources, versions, the GPU, settings, cost file, torch's modes.
        rest: facts on which the bits of everything else may hang too: precisions, settings of Inductor, variables.
        graphs: each compiled graph: its name, digests of it before the pass and of the code that was generated, guards on sizes,
            and its attentions, each with its place, shape, level, kernel, digests of kernels and order, and the facts that its
            bits hang on.
        choices: where sizes are known at run time, what was chosen for those that the process met, by the `order` of attentions.
    """

    attention: dict[str, str]
    rest: dict[str, str]
    graphs: tuple[dict[str, Any], ...] = ()
    choices: dict[str, dict[str, str]] | None = None

    def to_json(self) -> str:
        """Equal manifests have equal bytes."""
        values = {
            "version": VERSION,
            "attention": self.attention,
            "rest": self.rest,
            "graphs": list(self.graphs),
            "choices": self.choices or {},
        }
        return json.dumps({"digest": _digest(values), **values}, indent=1, sort_keys=True, ensure_ascii=True) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            temporary.write_text(self.to_json(), encoding="ascii", newline="\n")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def of_text(text: str, name: str = "it") -> Manifest:
        """The manifest whose JSON this is.

        Raises:
            ManifestFileError: it is none, in one sentence that begins with `name`.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise ManifestFileError(f"{name} is no manifest, or cut off: it is not JSON") from None
        if not isinstance(values, dict) or not isinstance(values.get("version"), int) or "digest" not in values:
            raise ManifestFileError(f"{name} is no manifest of dash_inductor: it has no version and no digest")
        if values["version"] != VERSION:
            raise ManifestFileError(
                f"{name} is a manifest of version {values['version']}, and this dash_inductor reads version {VERSION}: "
                "write it anew, or read it by the dash_inductor that wrote it"
            )
        found = values.pop("digest")
        if found != _digest(values) or not _is_whole(values):
            raise ManifestFileError(f"{name} was edited by hand, or damaged: its digest is not that of what it says")
        return Manifest(values["attention"], values["rest"], tuple(values["graphs"]), values["choices"])

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Manifest:
        """The manifest in a file.

        Raises:
            ManifestFileError: as `of_text`.
            OSError: the file cannot be read.
        """
        file = Path(path)
        if file.stat().st_size > MOST_BYTES:
            raise ManifestFileError(f"{path} is no manifest: it has more than {MOST_BYTES >> 20} MiB")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ManifestFileError(f"{path} is no manifest: it is not text") from None
        return Manifest.of_text(text, str(path))


def _digest(values: dict[str, Any]) -> str:
    return digest(json.dumps(values, sort_keys=True))


def _is_whole(values: dict[str, Any]) -> bool:
    """Whether each part has its type: so does what a digest was made for anew."""
    if not all(isinstance(values.get(name), kind) for name, kind in PARTS.items()):
        return False
    texts = [*values["attention"].values(), *values["rest"].values()]
    parts_of_graphs = all(
        isinstance(graph, dict)
        and all(isinstance(graph.get(name), kind) for name, kind in PARTS_OF_GRAPH.items())
        and all(isinstance(each, dict) and isinstance(each.get("hangs on"), list) for each in graph["attentions"])
        for graph in values["graphs"]
    )
    return parts_of_graphs and all(isinstance(text, str) for text in texts)


def now() -> Manifest:
    """That of this process, as far as it has come."""
    return Manifest(of_attention(own_device()), of_the_rest(), tuple(graphs.taken()), graphs.choices())
