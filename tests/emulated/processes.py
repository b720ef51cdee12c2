"""Processes that tests start: what they inherit, and that they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import dash_inductor

ROOT = Path(dash_inductor.__file__).parents[1]


def environment(folder: Path, seed: int) -> dict[str, str]:
    """That of a process whose only settings are emulation and its seed, and whose caches are in `folder`."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("DASH_INDUCTOR") and name != "TRITON_INTERPRET"
    }
    environ |= {"DASH_INDUCTOR_EMULATE": "1", "DASH_INDUCTOR_SEED": str(seed)}
    return environ | {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}


def script(command: Sequence[str], folder: Path, seed: int) -> str:
    """The output of `python command...`, which succeeds."""
    environ = environment(folder, seed)
    result = subprocess.run([sys.executable, *command], env=environ, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def ranks(
    count: int, command: Sequence[str], folder: Path, timeout: float = 900, own: Mapping[int, Mapping[str, str]] | None = None
) -> list[tuple[int, str, float]]:
    """Of `count` ranks, processes of `python command...`: exit status, output, and seconds from the first one's end to its own.

    own: by rank, variables of its own.

    Raises:
        AssertionError: one of them is still there `timeout` seconds later; all are killed then.
    """
    children: list[subprocess.Popen[bytes]] = []
    ends: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    try:
        for rank in range(count):
            environ = environment(folder, seed=0) | {"RANK": str(rank), "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
            environ |= (own or {}).get(rank, {})
            with (folder / f"{rank}.log").open("wb") as log:
                children.append(
                    subprocess.Popen([sys.executable, *command], env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
                )
        while len(ends) < count and time.monotonic() < deadline:
            for rank, child in enumerate(children):
                if rank not in ends and child.poll() is not None:
                    ends[rank] = time.monotonic()
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
    logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(count)]
    assert len(ends) == count, f"ranks {sorted(set(range(count)) - set(ends))} hang\n" + "\n".join(logs)
    return [(children[rank].returncode, logs[rank], ends[rank] - min(ends.values())) for rank in range(count)]
