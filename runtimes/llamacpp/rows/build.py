"""Compiles the kernels for few rows into one shared library, of which each part is for one
instruction set. Needs nothing but Python and a C++17 compiler: setup.py runs it, and tests do."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-rtti",
    "-fno-exceptions",
    "-ffp-contract=off",  # where a multiply-add rounds once, the source says so
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# Sources and what each needs beside COMMON, by processor as `platform.machine()` names it.
_X86 = {
    "kernels_avx512vnni.cpp": (*_AVX2, *_AVX512),
    "kernels_avxvnni.cpp": (*_AVX2, "-mavxvnni"),
    "kernels_avx2.cpp": _AVX2,
}
_ARM = {
    "kernels_i8mm.cpp": ("-march=armv8.2-a+dotprod+fp16+i8mm",),
    "kernels_dotprod.cpp": ("-march=armv8.2-a+dotprod+fp16",),
}
BY_MACHINE = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
EVERYWHERE = {"kernels_portable.cpp": (), "dispatch.cpp": (), "checks.cpp": (), "plugin.cpp": ()}


def library_name() -> str:
    return {"win32": "edge_spec_rows.dll", "darwin": "libedge_spec_rows.dylib"}.get(
        sys.platform, "libedge_spec_rows.so"
    )


def build(out: Path, compiler: Sequence[str] = (), machine: str = "") -> None:
    """Writes the shared library to `out`. compiler: a command, $CXX or c++ by default; machine: its
    target's. Raises OSError without one, subprocess.CalledProcessError where it fails."""
    command = list(compiler) or os.environ.get("CXX", "c++").split()
    sources = {**BY_MACHINE.get(machine or platform.machine(), {}), **EVERYWHERE}
    present = {name: flags for name, flags in sources.items() if (HERE / name).is_file()}
    with tempfile.TemporaryDirectory() as work:

        def compiled(item: tuple[str, Sequence[str]]) -> str:
            name, flags = item
            to = str(Path(work) / f"{name}.o")
            subprocess.run(
                [*command, *COMMON, *flags, "-c", str(HERE / name), "-o", to], check=True
            )
            return to

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, present.items()))
        out.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*command, "-shared", *objects, "-o", str(out), "-ldl"], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / library_name())
    parser.add_argument("--compiler", default="")
    parser.add_argument("--machine", default="")
    given = parser.parse_args()
    build(given.out, given.compiler.split(), given.machine)
