"""What trials on this machine said: a file for each kind of kernel, and a lock by which one process at a time tries one.

The lock holds what came of the last trial, for those that waited for it. That a kernel could not be tried stands there alone:
whoever starts later tries anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from .kind import Kind
from .machine import machine

VERSION = 2  # of the files' form
MOST_BYTES = 1 << 16  # of one
POLL = 0.1  # seconds between two looks at a lock

log = logging.getLogger("dash_inductor")


@dataclass(frozen=True)
class Verdict:
    """fit: whether the kernel may be used; None where it could not be tried. said: what was seen, or why it was not."""

    fit: bool | None
    said: str

    def text(self) -> str:
        """JSON, which `of_text` reads."""
        return json.dumps({"version": VERSION, **asdict(self)})

    @staticmethod
    def of_text(text: str) -> Verdict | None:
        """What `text` says; None of what is no such text."""
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.keys() != {"version", "fit", "said"} or found["version"] != VERSION:
            return None
        if not (found["fit"] is None or isinstance(found["fit"], bool)) or not isinstance(found["said"], str):
            return None
        return Verdict(found["fit"], found["said"])


def file_of(kind: Kind, device: str) -> Path:
    """Where the verdict on a kind stands, for this machine and version of everything."""
    named = json.dumps([machine(torch.device(device)), asdict(kind)])
    return Path(cache_dir(), "dash_inductor", "trials", f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json")


def read(file: Path) -> Verdict | None:
    """What a file says of a kernel that was tried; None where there is none, or it is damaged."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as found:  # a FIFO must not block
            if not stat.S_ISREG(os.fstat(found.fileno()).st_mode):
                return None
            verdict = Verdict.of_text(found.read(MOST_BYTES))
    except (OSError, ValueError):
        return None
    return None if verdict is None or verdict.fit is None else verdict


def write(file: Path, verdict: Verdict) -> None:
    """For other processes, as a whole or not at all. Whoever may read the folder may read the file."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
        try:
            new.write(verdict.text())
            new.flush()
            os.chmod(new.name, stat.S_IMODE(file.parent.stat().st_mode) & 0o666)
            os.replace(new.name, file)
        except OSError:
            with suppress(OSError):
                os.unlink(new.name)
            raise


def alone(file: Path, always: bool, seconds: float, tried: Callable[[], Verdict]) -> Verdict:
    """What `tried` says, or the file once it is there; no two processes try a kernel at a time.

    always: not by the file. seconds: how long a trial may take, and whoever waits for it waits.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, stat.S_IMODE(file.parent.stat().st_mode) & 0o666)
    except OSError as error:
        log.warning("what came out of a trial cannot be kept: %s; each process tries its kernels anew", error)
        return tried()
    try:
        return _in_turn(lock, file, always, seconds, tried)
    finally:
        os.close(lock)


def _in_turn(lock: int, file: Path, always: bool, seconds: float, tried: Callable[[], Verdict]) -> Verdict:
    waited = _acquire(lock, seconds)
    if waited is None:
        return Verdict(None, f"another process has tried it for {seconds:.0f} s")
    if not always:
        said = os.pread(lock, MOST_BYTES, 0).decode("utf-8", "replace") if waited else ""
        if found := read(file) or Verdict.of_text(said):
            return found
    verdict = tried()
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, verdict.text().encode(), 0)
        if verdict.fit is not None:
            write(file, verdict)
    except OSError as error:
        log.warning("what came out of a trial cannot be kept: %s; each process tries its kernels anew", error)
    return verdict


def _acquire(lock: int, seconds: float) -> bool | None:
    """Takes the lock; whether another had it first, None if it still has it after so long. A lock ends with its process."""
    try:
        import fcntl
    except ImportError:  # no system with a GPU that Triton serves lacks it
        return False
    deadline, waited = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return waited
        except BlockingIOError:
            waited = True
        except OSError:  # a file system without locks
            return False
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL)
