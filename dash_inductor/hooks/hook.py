"""Places of torch that are something else while the package is on, and afterwards what they were."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import ClassMethodDescriptorType, MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

Undo = Callable[[], None]
Put = Callable[[Any, str], Undo]  # fills an attribute of an owner


@dataclass(frozen=True)
class Hook:
    """One place of torch that the package fills.

    Attributes:
        owner: the module that has it, or "module:Class", or another name inside of it.
        name: of the attribute there.
        purpose: what it is for.
        put: how it is patched. None for a place that torch offers to others: no release of torch should move it.
        key: of the entry, by its name, where the attribute is a dict of which one entry is patched.
        needed: whether no attention is rewritten where torch has lost it; else just the purpose is lost.
        since: the first torch that has it.
    """

    owner: str
    name: str
    purpose: str
    put: Put | None = None
    key: str | None = None
    needed: bool = True
    since: str = "2.11"

    @property
    def place(self) -> str:
        """Where it is, in one word."""
        entry = f"[{self.key.rpartition('.')[2]}]" if self.key else ""
        return f"{self.owner.replace(':', '.')}.{self.name}{entry}"

    @property
    def is_missing(self) -> bool:
        """Whether this torch does not have it. Imports its module."""
        try:
            value = getattr(self.found_owner(), self.name)
        except (ImportError, AttributeError):
            return True
        return self.key is not None and pkgutil.resolve_name(self.key) not in value

    def found_owner(self) -> Any:
        """The module or class."""
        return pkgutil.resolve_name(self.owner)


class Hooks:
    """Patches that are put when they are first asked for, and undone when nobody asks for them any more."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._askers = 0
        self._put: dict[Hook, Undo] = {}

    def ask(self, *hooks: Hook) -> None:
        """Puts those that are not there yet, for one more asker; not those that torch does not have."""
        with self._lock:
            self._askers += 1
            self.add(*hooks)

    def add(self, *hooks: Hook) -> None:
        """Puts those that are not there yet, for those that ask already; nothing where nobody asks."""
        with self._lock:
            for hook in hooks if self._askers else ():
                if hook.put is not None and hook not in self._put and not hook.is_missing:
                    self._put[hook] = hook.put(hook.found_owner(), hook.name)

    def ask_if(self, wanted: bool, *hooks: Hook) -> None:
        """Has one asker where they are wanted, and else none."""
        with self._lock:
            if wanted and not self._askers:
                self.ask(*hooks)
            elif self._askers and not wanted:
                self.leave()

    def leave(self) -> None:
        """One asker less; the last one's leaving undoes all."""
        with self._lock:
            self._askers -= 1
            while self._put and not self._askers:
                _, undo = self._put.popitem()
                undo()


PATCHES = Hooks()


def around(function: str) -> Put:
    """A call of the attribute is `function(stock, ...)`. Names are "module:name", and imported when a hook is put."""

    def put(owner: Any, name: str) -> Undo:
        stock = getattr(owner, name)
        setattr(owner, name, _standing_around(stock, function))
        return lambda: setattr(owner, name, stock)

    return put


def around_entry(key: str, function: str) -> Put:
    """A call of the dict's entry is `function(stock, ...)`."""

    def put(owner: Any, name: str) -> Undo:
        entries, entry = getattr(owner, name), pkgutil.resolve_name(key)
        stock = entries[entry]
        entries[entry] = _standing_around(stock, function)
        return lambda: entries.__setitem__(entry, stock)

    return put


def last_member(member: str) -> Put:
    """The list ends with `member`."""

    def put(owner: Any, name: str) -> Undo:
        members, ours = getattr(owner, name), pkgutil.resolve_name(member)
        members.append(ours)
        return lambda: members.remove(ours)

    return put


def first_entry(key: str, value: str) -> Put:
    """The dict begins with this entry, for its order counts, and others may come sooner or later."""

    def put(owner: Any, name: str) -> Undo:
        entries = getattr(owner, name)
        others = dict(entries)
        entries.clear()
        entries.update({key: pkgutil.resolve_name(value), **others})
        return lambda: entries.pop(key, None)

    return put


def dispatched(function: str, *dispatch_keys: str) -> Put:
    """A call of the op is `function(op, stock, keyset, ...)` where the dispatcher comes to a key; stock is the kernel it had."""

    def put(owner: Any, name: str) -> Undo:
        return overridden({key: getattr(owner, name).default for key in dispatch_keys}, pkgutil.resolve_name(function))

    return put


def overridden(ops: Mapping[str, OpOverload], function: Callable[..., Any]) -> Undo:
    """Kernels that stand in the dispatcher in front of stock's, by dispatch key; of ops of one namespace."""
    library = torch.library.Library(next(iter(ops.values())).namespace, "IMPL")

    def forget() -> None:  # tracing remembers where an op goes, also to a kernel that is gone
        for dispatch_key, op in ops.items():
            op._uncache_dispatch(getattr(torch.DispatchKey, dispatch_key))

    def undo() -> None:
        library._destroy()
        forget()

    for dispatch_key, op in ops.items():
        stock = torch.library.get_kernel(op, dispatch_key)
        library.impl(op, functools.partial(function, op, stock), dispatch_key, with_keyset=True)
    forget()
    return undo


_here: ContextVar[Mapping[Undo, Callable[..., Any]]] = ContextVar("here", default=MappingProxyType({}))
_places: dict[tuple[Any, str], tuple[int, Undo]] = {}  # how many stand around one, and what makes it as it was
_lock = threading.RLock()


@contextlib.contextmanager
def around_here(owner: Any, name: str, function: Callable[..., Any], *, dynamo: bool = True) -> Iterator[None]:
    """Inside, a call of the attribute in this thread is `function(stock, ...)`; in other threads it is as ever.

    The attribute may be a function of a module, a class's own or inherited method of any kind, or a property.

    dynamo: False keeps Dynamo from tracing the call, but not what stock calls. Before torch 2.15 it cannot trace the call.
    """
    place = owner, name
    with _lock:
        count, undo = _places.get(place) or (0, _put_here(owner, name, dynamo))
        _places[place] = count + 1, undo
    token = _here.set({**_here.get(), undo: function})
    try:
        yield
    finally:
        _here.reset(token)
        with _lock:
            count, _ = _places.pop(place)
            if count > 1:
                _places[place] = count - 1, undo
            else:
                undo()


def _put_here(owner: Any, name: str, dynamo: bool) -> Undo:
    kept = inspect.getattr_static(owner, name)
    shield: Callable[..., Any] = (lambda f: f) if dynamo else functools.partial(torch._dynamo.disable, recursive=False)
    stock: Any
    kind: Callable[..., Any] | None
    if isinstance(kept, property):
        kind, stock = property, kept.fget
    elif isinstance(kept, staticmethod):
        kind, stock = staticmethod, kept.__func__
    elif isinstance(kept, (classmethod, ClassMethodDescriptorType)):  # the latter is of C
        kind, stock = classmethod, shield(lambda cls, *args, **kwargs: kept.__get__(None, cls)(*args, **kwargs))
    else:
        kind, stock = None, kept

    @functools.wraps(stock)
    def let_through(*args: Any, **kwargs: Any) -> Any:
        function = _here.get().get(undo)
        return stock(*args, **kwargs) if function is None else function(stock, *args, **kwargs)

    let_through.dash_inductor = name  # type: ignore[attr-defined]
    call = shield(let_through)
    is_own, ours = name in vars(owner), kind(call) if kind else call
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is not ours:
            return  # somebody stands around ours, which goes on to let everybody through
        if is_own:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)

    return undo


def _standing_around(stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    function = pkgutil.resolve_name(name)

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    wrapped.dash_inductor = name  # type: ignore[attr-defined]
    return wrapped
