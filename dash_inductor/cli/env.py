"""Reports what a bug report needs: versions, GPUs, settings, caches, and whether this package is switched on.

The text is ready to paste: it has no user name, no host name, and ~ for the home folder. What would keep attention on its stock
kernel, or a misspelt DASH_INDUCTOR_* variable, is listed under "Problems", each with its remedy; the exit status is 1 then. The
modes are those of a new process: a script may change them.
"""

from __future__ import annotations

import argparse
import difflib
import getpass
import os
import pkgutil
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import BATCH_INVARIANT, PREFIX, Config, chosen, current, from_environment, variable
from ..devices.cost_files import COSTS_REMEDY, CostFileError, digest_of
from .arguments import add_json
from .console import print_json, section

EXAMPLES = ("", "--json")
ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("flash-attn", "flash-attn-3", "flash-attn-4", "transformer-engine", "xformers", "transformers", "torchtitan"),
    *("nvidia-cudnn-frontend", "sympy", "greenlet", "matplotlib"),
)
# What nvidia-smi is asked of each GPU, and the report's name for it. It does not say whether clocks are locked (--lock-gpu-clocks).
SMI = {
    "driver_version": "driver",
    "mig.mode.current": "MIG mode",
    "persistence_mode": "persistence mode",
    "clocks.sm": "SM clock, MHz",
    "clocks.applications.graphics": "application clock, MHz",
    "clocks.max.sm": "highest SM clock, MHz",
}
ALWAYS_SHOWN = {
    "CUBLAS_WORKSPACE_CONFIG": "deterministic cuBLAS wants :4096:8",
    "PYTHONHASHSEED": "hash() of text varies",
    "TRITON_DEFAULT_FP_FUSION": "Triton's default decides bits of Inductor's own kernels; ours fuse",
}
SHOWN_IF_SET = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_PROTO"),
    *("TRITON_INTERPRET", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_LOGS", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
)
SECONDS = 10  # for another program to answer
MOST_FILES = 200_000  # of a cache, which are counted one by one


@dataclass
class Report:
    """Sections of names and figures, a section for each GPU, and what is wrong, in sentences with a remedy."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, title: str, figures: Callable[[list[str]], dict[str, Any]]) -> None:
        """Add a section, with its problems; one that cannot be had says why, and the others are there all the same."""
        try:
            self.sections[title] = figures(self.problems)
        except Exception as error:
            self.sections[title] = {"not available": f"{type(error).__name__}: {error}"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `env`."""
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 if it lists a problem."""
    report = collect(dict(os.environ))
    sections, gpus, problems = shortened((report.sections, report.gpus, report.problems))
    if args.json:
        print_json(_keys({**sections, "gpus": gpus, "problems": problems}))
        return int(bool(problems))
    for title, figures in sections.items():
        section(title, {name: _text(name, figure) for name, figure in figures.items()})
        if title == "Versions":
            for n, gpu in enumerate(gpus):
                section(f"GPU {n}", gpu)
            if not gpus:
                section("GPUs", {})
    section("Problems", {str(n): problem for n, problem in enumerate(problems, 1)})
    return int(bool(problems))


def collect(environ: Mapping[str, str]) -> Report:
    """The report, by the environment variables as they were before torch was imported."""
    report = Report()
    report.add("Versions", lambda _: versions())
    report.gpus = _smi()
    try:
        from . import env_torch
    except Exception as error:
        report.sections["Versions"]["torch"] = _version("torch")
        why = " ".join(f"{type(error).__name__}: {error}".split())
        report.problems.append(f"torch cannot be imported ({why}): install it anew (pip install torch), and run this again")
    else:
        report.sections["Versions"] |= env_torch.versions()
        report.add("Modes of torch", lambda _: env_torch.modes())
        report.add("Settings of Inductor", env_torch.inductor)
        report.add("This package in torch", env_torch.in_torch)
        report.add("Places of torch that are filled", env_torch.hooks)
        report.gpus = env_torch.gpus(report.gpus, report.problems)
    report.add("Settings", lambda problems: settings(problems, environ))
    report.add("Environment", lambda _: environment(environ))
    report.add("Ways in", ways_in)
    report.add("Caches", lambda _: caches(environ))
    return report


def versions() -> dict[str, Any]:
    """What runs, torch and Triton apart."""
    figures: dict[str, Any] = {"dash-inductor": __version__, "commit": _commit()}
    figures["python"] = f"{platform.python_version()} ({platform.python_implementation()})"
    figures["OS"] = platform.platform()
    return figures | {name: version for name in PACKAGES if (version := _version(name)) is not None}


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _commit() -> str | None:
    """The commit of a checkout; None where the package is installed."""
    if not (ROOT / ".git").exists() or not (ROOT / "pyproject.toml").exists():
        return None
    commit = _answer("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    changed = _answer("git", "-C", str(ROOT), "status", "--porcelain").strip()
    return f"{commit}, and changes that are not committed" if commit and changed else commit or None


def _answer(program: str, *arguments: str) -> str:
    """What another program prints; "" if it cannot, or is not there."""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _smi() -> list[dict[str, Any]]:
    """The GPUs that nvidia-smi sees; `uuid` joins them with those of torch."""
    lines = _answer("nvidia-smi", f"--query-gpu=uuid,name,{','.join(SMI)}", "--format=csv,noheader,nounits").splitlines()
    rows = (dict(zip(("uuid", "name", *SMI.values()), map(str.strip, line.split(",")), strict=False)) for line in lines)
    return [{name: value for name, value in row.items() if not value.startswith("[")} for row in rows]  # such as [N/A]


def settings(problems: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Each setting, its value and where that comes from; problems with the variables."""
    names = {variable(f.name): f.name for f in fields(Config)}
    right: dict[str, str] = {}
    for name, value in sorted(environ.items()):
        if name in names:
            try:
                from_environment({name: value})
                right[name] = value
            except ValueError as error:
                problems.append(f"{error}: change it, or unset it")
        elif name.startswith(f"{PREFIX}_"):
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(names)}"
            problems.append(f"{name} is not a setting, and stops every compilation: {hint}")
        elif close := difflib.get_close_matches(name, names, 1, cutoff=0.85):
            problems.append(f"{name} is not read: did you mean {close[0]}?")
    try:
        asked = from_environment(right)
    except ValueError as error:
        problems.append(f"{error}: change one of them")
        asked, right = Config(), {}
    try:
        in_force, here = current(), chosen()
    except ValueError:  # which is among the problems
        in_force = here = asked
    try:
        digest_of(in_force.costs)
    except CostFileError as error:
        if (problem := f"{error}: {COSTS_REMEDY}") not in problems:  # a GPU may have told it
            problems.append(problem)
    figures = {}
    for source, name in names.items():
        value = getattr(in_force, name)
        origin = "configure()" if value != getattr(asked, name) else source if source in right else "default"
        origin = BATCH_INVARIANT if value != getattr(here, name) else origin
        figures[name] = {"value": value, "from": origin}
    return figures


def environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Variables that others read, and that results may depend on."""
    return {name: environ.get(name) for name in (*ALWAYS_SHOWN, *(name for name in SHOWN_IF_SET if name in environ))}


def ways_in(problems: list[str]) -> dict[str, Any]:
    """The entry points by which torch finds this package."""
    figures = {}
    for group, name in (("torch.backends", "dash_inductor"), ("torch_dynamo_backends", "dash")):
        found = any(point.name == name for point in metadata.entry_points(group=group))
        figures[f"entry point of {group}"] = "found" if found else "not found"
        if not found:
            problems.append(
                f"no entry point {name!r} in {group}: install the package (pip install .), or call dash_inductor.enable()"
            )
    return figures


def caches(environ: Mapping[str, str]) -> dict[str, Any]:
    """Folders of compiled code, and their sizes."""
    home = Path(environ.get("TRITON_HOME") or Path.home())
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None:
        with suppress(Exception):
            inductor = pkgutil.resolve_name("torch._inductor.runtime.cache_dir_utils:default_cache_dir")()
    folders = {"Inductor": inductor, "Triton": environ.get("TRITON_CACHE_DIR") or str(home / ".triton" / "cache")}
    return {name: {"folder": folder, **_size(Path(folder))} for name, folder in folders.items() if folder}


def _size(folder: Path) -> dict[str, int]:
    """Files and bytes; of more than MOST_FILES, those that were counted."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
            files += 1
        if files > MOST_FILES:
            break
    return {"files": files, "bytes": size}


def shortened(value: Any) -> Any:
    """`value` without the home folder and the user's name in its texts."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items() if name != "uuid"}
    if isinstance(value, (list, tuple)):
        return [shortened(each) for each in value]
    if not isinstance(value, str):
        return value
    home, user = os.path.expanduser("~").rstrip("/"), ""
    with suppress(Exception):
        user = getpass.getuser()
    value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value) if home else value
    return re.sub(rf"(?<=[/_]){re.escape(user)}(?=[/\s)]|$)", "<user>", value) if user else value


def _keys(value: Any) -> Any:
    """`value` with names for JSON: "memory, GiB" is memory_gib."""
    if isinstance(value, list):
        return [_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {_key(name): _keys(each) for name, each in value.items()}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_") if " " in name or name.istitle() else name


def _text(name: str, figure: Any) -> Any:
    """A figure, a setting or a cache in one line."""
    if isinstance(figure, dict) and "folder" in figure:
        at_least = "at least " if figure["files"] > MOST_FILES else ""
        return f"{figure['folder']} ({at_least}{figure['files']:,} files, {figure['bytes'] / 2**20:,.1f} MiB)"
    if isinstance(figure, dict) and "from" in figure:
        return f"{figure['value']} ({figure['from']})"
    if isinstance(figure, dict):
        return figure["value"] if figure["value"] != "missing" else f"missing: {figure['purpose']}"
    return f"not set ({ALWAYS_SHOWN[name]})" if figure is None and name in ALWAYS_SHOWN else figure
