"""Takes the SASS of the published kernels from wheels, and compiles what no wheel has: one file each in build/published.

    python -m benchmarks.published.extract torch-2.13.0-*.whl flash_attn3_jax-0.2.3-*.whl
    python -m benchmarks.published.extract --flash-attn-4 FOLDER --triton

A wheel comes from PyPI by `pip download --no-deps`; that of torch has to be the one for CUDA (500 MB). FOLDER is where `pip install
--target FOLDER flash-attn-4==4.0.0b36` put that package. Nothing needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton

from .kernels import FA4, JAX, KERNELS, TORCH, TRITON, Kernel

ROOT = Path(__file__).parents[2]
SASS = ROOT / "build" / "published"
# Of a wheel: the library with its kernels, and which of its cubins: cuobjdump takes a part of their names.
LIBRARIES = {
    TORCH: ("torch/lib/libtorch_cuda.so", ".sm_90.cubin"),
    JAX: ("flash_attn3_jax_lib/flash_api", "hdim128_fp16_sm90.sm_90a.cubin"),
}


def cuobjdump(*arguments: str | Path, cwd: Path | None = None) -> str:
    """What it prints; CalledProcessError if it fails."""
    command = [triton.knobs.nvidia.cuobjdump.path, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def package_of(wheel: Path) -> str:
    """Which of LIBRARIES it is; ValueError if none."""
    name, version = wheel.name.split("-")[:2]
    package = f"{name} {version}"
    if package not in LIBRARIES:
        raise ValueError(f"{wheel}: no wheel of {' or '.join(LIBRARIES)}")
    return package


def from_wheel(wheel: Path, out: Path) -> Iterator[Kernel]:
    """Write the kernels of a wheel; ValueError for a wheel of another package, or without one of them."""
    package = package_of(wheel)
    library, cubins = LIBRARIES[package]
    wanted = {kernel.symbol.encode(): kernel for kernel in KERNELS.values() if kernel.package == package}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.startswith(library)), None)
        if member is None:
            raise ValueError(f"{wheel}: it has no {library}: of torch, take the wheel for CUDA")
        archive.extract(member, folder)
        cuobjdump("-xelf", cubins, Path(folder, member), cwd=Path(folder))
        for cubin in sorted(Path(folder).glob("*.cubin")):
            names = sorted({*re.findall(rb"(?<=\0)_Z\w+(?=\0)", cubin.read_bytes())})
            for symbol in [symbol for symbol in wanted if any(re.search(symbol, name) for name in names)]:
                name = next(name for name in names if re.search(symbol, name))
                kernel = wanted.pop(symbol)
                (out / kernel.file).write_text(cuobjdump("-sass", "-fun", name.decode(), cubin))
                yield kernel
    if wanted:
        raise ValueError(f"{wheel}: not found: {', '.join(kernel.label for kernel in wanted.values())}")


def compiled_by_flash_attn(packages: Path, out: Path) -> Iterator[Kernel]:
    """Write the kernels that flash-attn-4, which lies in a folder, compiles."""
    for kernel in (kernel for kernel in KERNELS.values() if kernel.package == FA4):
        with tempfile.TemporaryDirectory() as folder:
            variables = {
                "PYTHONPATH": str(ROOT),
                "FLASH_ATTENTION_ARCH": "sm_90",
                "CUTE_DSL_ARCH": "sm_90a",
                "CUTE_DSL_KEEP": "cubin",
                "CUTE_DSL_KEEP_CUBIN": "1",
                "CUTE_DSL_DUMP_DIR": folder,
            }
            command = [
                sys.executable,
                "-m",
                "benchmarks.published.flash_attn_4",
                str(packages.resolve()),
                str(kernel.head_dim),
                kernel.mask,
            ]
            subprocess.run(command, env=os.environ | variables, check=True, cwd=folder)
            texts = [cuobjdump("-sass", cubin) for cubin in sorted(Path(folder).rglob("*.cubin"))]
        (text,) = (text for text in texts if "HGMMA" in text)
        (out / kernel.file).write_text(text)
        yield kernel


def compiled_by_triton(out: Path) -> Iterator[Kernel]:
    """Write the forward kernel in the form of Triton's tutorial."""
    from .triton_forward import compiled

    for kernel in (kernel for kernel in KERNELS.values() if kernel.package == TRITON):
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(compiled(kernel.head_dim, kernel.rows, kernel.columns, kernel.warps))
            (out / kernel.file).write_text(cuobjdump("-sass", cubin))
        yield kernel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published.extract", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL", help=f"of {' or '.join(LIBRARIES)}")
    parser.add_argument("--flash-attn-4", type=Path, metavar="FOLDER", help="where that package is installed: compile its kernels")
    parser.add_argument(
        "--triton", action="store_true", help=f"compile Triton's, by the Triton that is installed ({TRITON} is meant)"
    )
    args = parser.parse_args(argv)
    SASS.mkdir(parents=True, exist_ok=True)
    try:
        for wheel in args.wheels:
            _tell(from_wheel(wheel, SASS))
        if args.flash_attn_4:
            _tell(compiled_by_flash_attn(args.flash_attn_4, SASS))
        if args.triton:
            _tell(compiled_by_triton(SASS))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _tell(kernels: Iterator[Kernel]) -> None:
    for kernel in kernels:
        print(f"{kernel.label}: {(SASS / kernel.file).relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
