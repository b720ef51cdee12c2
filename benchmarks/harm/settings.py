"""The settings that a suite runs in, and which of them must come out alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OFF = {"DASH_INDUCTOR": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@dataclass(frozen=True)
class Setting:
    """`installed`: the package is, and switches itself on. `emulated`: a CPU runs the Triton code that a GPU would."""

    installed: bool
    deterministic: bool
    emulated: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process in this setting."""
        return ({} if self.installed else OFF) | ({"TRITON_INTERPRET": "1"} if self.emulated else {})

    def require(self) -> None:
        """Raises RuntimeError unless this process, in which torch and Inductor are imported, is in the setting."""
        from torch._inductor.codegen import common

        found = "dash_inductor" in common.custom_backend_passes
        if found and not self.installed:
            raise RuntimeError("the package is in Inductor, where it should not be")
        if self.installed and not found:
            raise RuntimeError("the package is not installed in this environment: pip install .")


SETTINGS: Mapping[str, Setting] = {
    "off, without": Setting(installed=False, deterministic=False),
    "off, with": Setting(installed=True, deterministic=False),
    "on, without": Setting(installed=False, deterministic=True),
    "on, with": Setting(installed=True, deterministic=True),
    "emulated, without": Setting(installed=False, deterministic=True, emulated=True),
    "emulated, with": Setting(installed=True, deterministic=True, emulated=True),
}
# name of a comparison -> settings without the package and with it
PAIRS: Mapping[str, tuple[str, str]] = {
    "deterministic mode off": ("off, without", "off, with"),
    "deterministic mode on": ("on, without", "on, with"),
    "emulated": ("emulated, without", "emulated, with"),
}
