"""A Triton driver for a machine without a GPU: Inductor asks it for a target, a device and a stream, and gets constants."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class EmulatedDriver(DriverBase):
    """Looks like one Hopper GPU (warp size 32) whose tensors live on the CPU. Launches nothing: Triton interprets."""

    @classmethod
    def is_active(cls) -> bool:
        """Always."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """NotImplementedError: nothing is launched."""
        raise NotImplementedError("the emulated driver compiles no launchers")

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The one device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """The one stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors live."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """torch's module for that device."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """NotImplementedError: no time means anything."""
        raise NotImplementedError("timing the interpreter says nothing about a GPU")
