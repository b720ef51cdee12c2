"""The generated wrapper executed on the CPU: torch's ops are the CPU's, and every Triton kernel is executed from its PTX.

`Session` replaces what a GPU's launch would reach: CompiledKernel's handles, the allocator that wrappers call, devices. All tensors
lie in one arena (memory.Global). So tables, zeroing, strides, grids, constants and the order of kernels are the real ones. Ops that
need a GPU, such as the forward's attention, are answered by `externs`, and listed in `Session.externs_used` with the CPU's own.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.compiler.compiler import CompiledKernel

from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.lowering import failed_waits
from dash_inductor.lowering.launch import gluon

from .copies import Descriptor
from .lower import Program
from .machine import Machine
from .memory import Global
from .parse import parse

SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}  # Triton's numbers for TMA
VIEWS = re.compile(r"detach|view|as_strided|alias|select|slice|transpose|expand|unsqueeze|squeeze|permute|t\.default")  # no work


@dataclass
class Executed:
    """One launch."""

    kernel: str
    grid: tuple[int, int, int]
    seconds: float
    races: list[dict[str, Any]]
    program: Program


@dataclass
class Session:
    """Inside `with session.running():` Triton's launches execute PTX.

    Programs are kept by their PTX, and may be handed on to another session of the same code, edited or not. `patience`: Machine's.
    What kernels report of waits that give up lies in the arena: `failed_waits()` reads it while the session runs.
    """

    device: str
    arena: int = 1 << 26
    seed: int = 0
    check: bool = True
    patience: int = 0
    to_the_end: bool = True  # behind the first race
    externs: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    executed: list[Executed] = field(default_factory=list)
    externs_used: list[str] = field(default_factory=list)
    ops: Any = None  # torch's, while running

    def __post_init__(self) -> None:
        self.memory = Global(self.arena)
        self.externs[gluon.SDPA_BACKWARD_GLUON] = self._launch_gluon
        self.reports = self.memory.put(torch.zeros(failed_waits.REPORTS, failed_waits.INTS, dtype=torch.int32), "reports of waits")

    def _launch_gluon(self, *arguments: Any) -> None:
        with self.ops:  # what it allocates lies in the arena
            gluon.sdpa_backward_gluon(*arguments)

    @contextlib.contextmanager
    def running(self) -> Iterator[Session]:
        """The device's place is taken by this executor."""
        session = self

        def handles(kernel: CompiledKernel) -> None:
            kernel._run = _Launcher(session, kernel)
            kernel.module, kernel.function = kernel, None
            kernel.n_regs, kernel.n_spills, kernel.n_max_threads = 0, 0, 1 << 10
            stack.callback(forget, kernel)

        def forget(kernel: CompiledKernel) -> None:
            """Triton keeps kernels, which would keep the memory of every session."""
            kernel._run = kernel.module = None

        nothing: Any = contextlib.nullcontext
        guards = torch._C._dynamo.guards
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_gpu(self.device))
            stack.enter_context(inductor_config.patch(use_static_triton_launcher=False))
            for where, name, value in (
                (CompiledKernel, "_init_handles", handles),
                (failed_waits, "_reports", lambda: self.reports),
                (guards, "_empty_strided_cuda", lambda size, stride, dtype: self.memory.empty(size, stride, dtype)),
                (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
                (torch.cuda, "_DeviceGuard", lambda device: nothing()),
                (torch.cuda, "device", lambda device: nothing()),
                (torch.cuda, "set_device", lambda device: None),
            ):
                stack.enter_context(mock.patch.object(where, name, value, create=True))
            self.ops = stack.enter_context(_InArena(self))
            yield self

    def program(self, ptx: str) -> Program:
        if ptx not in self.programs:
            self.programs[ptx] = Program(parse(ptx))
        return self.programs[ptx]


class _InArena(TorchDispatchMode):
    """Torch's ops: results are put into the arena, what they write counts as written, and some are answered by others."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        session, memory = self.session, self.session.memory
        answer = session.externs.get(func)
        name = str(func)
        if not VIEWS.search(name):
            session.externs_used.append(f"{name}, from the reference" if answer and "gluon" not in name else name)
        result = (answer or func)(*args, **kwargs)
        for tensor, parameter in zip(args, func._schema.arguments, strict=False):
            if parameter.alias_info and parameter.alias_info.is_write and tensor is not None:
                memory.mark(tensor)

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if memory.holds(tensor) or not tensor.numel() or tensor.is_meta:
                return tensor
            made = memory.empty(tensor.shape, tensor.stride(), tensor.dtype, name)
            if "empty" not in name:
                made.copy_(tensor)
                memory.mark(made)
            return made

        with torch.utils._python_dispatch._disable_current_modes():
            return tree_map_only(torch.Tensor, placed, result)


class _Launcher:
    """In the place of Triton's: called with the grid and the arguments of the Python function, constants among them."""

    def __init__(self, session: Session, kernel: CompiledKernel) -> None:
        self.session, self.kernel = session, kernel

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *hooks_and_arguments: Any) -> None:
        session, metadata = self.session, self.kernel.metadata
        arguments = hooks_and_arguments[4:]
        tensor_maps = list(getattr(metadata, "tensordesc_meta", None) or [])
        parameters: list[int] = []
        descriptors: dict[int, Descriptor] = {}
        for kind, value in zip(self.kernel.src.signature.values(), arguments, strict=True):
            _flatten(kind, value, parameters, descriptors, tensor_maps)
        program = session.program(self.kernel.asm["ptx"])
        if getattr(metadata, "global_scratch_size", 0):
            size = metadata.global_scratch_size * x * y * z
            parameters.append(session.memory.empty((size,), (1,), torch.uint8, "scratch").data_ptr())
        machine = Machine(
            program,
            session.memory,
            parameters,
            (x, y, z),
            shared_bytes=metadata.shared,
            seed=session.seed,
            patience=session.patience,
            check=session.check,
            to_the_end=session.to_the_end,
            descriptors=descriptors,
        )
        start = time.perf_counter()
        try:
            machine.run()
        finally:
            races = machine.races.listed() if session.check else []
            session.executed.append(Executed(program.kernel.name, (x, y, z), time.perf_counter() - start, races, program))


def _flatten(kind: Any, value: Any, parameters: list[int], descriptors: dict[int, Descriptor], tensor_maps: list[Any]) -> None:
    """Appends the kernel's parameters for one argument."""
    if isinstance(kind, tuple):
        for each, part in zip(kind, value, strict=True):
            _flatten(each, part, parameters, descriptors, tensor_maps)
    elif kind == "constexpr":
        return
    elif str(kind).startswith("tensordesc"):
        base, meta = value.base, tensor_maps.pop(0)
        shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.strides))
        box, swizzle = tuple(meta["block_size"]), SWIZZLES[meta["swizzle"]]
        descriptors[len(parameters)] = Descriptor(base.data_ptr(), shape, strides, box, meta["elem_size"], swizzle, base.dtype)
        parameters += [0, *shape, *strides]
    elif isinstance(value, torch.Tensor):
        parameters.append(value.data_ptr())
    elif value is None:
        parameters.append(0)
    elif isinstance(value, float):
        if kind != "fp32":
            raise NotImplementedError(f"parameters of type {kind}")
        parameters.append(int(np.float32(value).view(np.uint32)))
    else:
        parameters.append(int(value))


class _Inductors:
    """A kernel of a generated wrapper: compiled when it first runs, and launched as Inductor would its first configuration."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.launcher: Any = None

    def run(self, *args: Any, stream: Any, **kwargs: Any) -> None:
        if self.launcher is None:
            module = PyCodeCache.load(self.source)
            tuner = next(value for value in vars(module).values() if hasattr(value, "precompile"))
            tuner.precompile(warm_cache_only=True)
            self.launcher = tuner.compile_results[0].make_launcher()
        self.launcher(*args, stream=stream, **kwargs)


def call(wrapper: str, arguments: list[torch.Tensor], constants: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Runs a generated wrapper inside of a running session. `constants` are the graph's, by name."""
    kernels: dict[str, _Inductors] = {}

    def compiled(self: AsyncCompile, name: str, source: str, *_: Any, **__: Any) -> _Inductors:
        return kernels.setdefault(name, _Inductors(source))

    scope: dict[str, Any] = {"__name__": "wrapper"}
    with mock.patch.object(AsyncCompile, "triton", compiled), mock.patch.object(AsyncCompile, "wait", lambda self, scope: None):
        exec(compile(wrapper, "<wrapper>", "exec"), scope)
        scope.update(constants)
        return scope["call"](list(arguments))
