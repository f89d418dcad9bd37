"""Compiles the kernels for few rows into one shared library, with a part for each instruction set.
Needs only Python and a C++17 compiler; setup.py and tests run it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
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
    "-ffp-contract=off",  # the source says where multiply-add fuses
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# Kernel tables, fastest first, with their flags besides COMMON, by `platform.machine()`.
_X86: Mapping[str, Sequence[str]] = {
    "kernels_avx512vnni.cpp": (*_AVX2, *_AVX512),
    "kernels_avxvnni.cpp": (*_AVX2, "-mavxvnni"),
    "kernels_avx2.cpp": _AVX2,
}
_ARM: Mapping[str, Sequence[str]] = {"kernels_dotprod.cpp": ("-march=armv8.2-a+dotprod",)}
BY_MACHINE = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
EVERYWHERE: Mapping[str, Sequence[str]] = {
    "kernels_portable.cpp": (),
    "dispatch.cpp": (),
    "log.cpp": (),
    "taps.cpp": (),
    "checks.cpp": (),
    "checks_attention.cpp": (),
    "ort_operator.cpp": ("-fexceptions",),
    "ort_weights.cpp": ("-fexceptions",),  # out of memory
    "plugin.cpp": ("-fexceptions",),  # a thread may fail to start
    "plugin_attention.cpp": (),
    "plugin_install.cpp": (),
    "plugin_memory.cpp": (),
    "plugin_products.cpp": (),
}


def library_name() -> str:
    return {"win32": "edge_spec_rows.dll", "darwin": "libedge_spec_rows.dylib"}.get(
        sys.platform, "libedge_spec_rows.so"
    )


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def digest() -> str:
    made_of = [*sources(), Path(__file__)]
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in made_of)).hexdigest()


def is_current(library: Path) -> bool:
    """Return whether the library matches the sources beside this file; wheels have none."""
    if not library.is_file() or not sources():
        return library.is_file()
    return _mark().encode() in library.read_bytes()


def _mark() -> str:
    """Return the mark that dispatch.cpp leaves in a library."""
    return f"compiled from {digest()}"


def build(out: Path, compiler: Sequence[str] = (), machine: str = "") -> None:
    """Write the shared library to `out`, reproducibly, without instruction sets that the compiler
    lacks. compiler: a command, by default $CXX or c++; machine: its target. Raises OSError without
    a compiler, subprocess.CalledProcessError if it fails."""
    command = list(compiler) or os.environ.get("CXX", "c++").split()
    tables = BY_MACHINE.get(machine or platform.machine(), {})
    with tempfile.TemporaryDirectory() as work:
        known = {name: flags for name, flags in tables.items() if _knows(command, flags, work)}
        flags = {name: f for name, f in {**known, **EVERYWHERE}.items() if (HERE / name).is_file()}
        defined = (f"-DROWS_TABLES={_tables(flags)}", f'-DROWS_MARK="{_mark()}"')
        common = (*COMMON, f"-ffile-prefix-map={HERE}=.", *defined)

        def compiled(name: str) -> str:
            to = str(Path(work) / f"{name}.o")
            tried = [*command, *common, *flags[name], "-c", str(HERE / name), "-o", to]
            subprocess.run(tried, check=True)
            return to

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, flags))
        made = str(Path(work) / "library")
        subprocess.run([*command, "-shared", *objects, "-o", made, "-ldl", "-pthread"], check=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: processes may have the old one loaded.
        beside = out.with_name(f".{out.name}.{os.getpid()}")
        shutil.copyfile(made, beside)
        beside.replace(out)


def _tables(names: Iterable[str]) -> str:
    """Return dispatch.cpp's list, such as TABLE(avx2)TABLE(portable)."""
    found = (re.fullmatch(r"kernels_(\w+)\.cpp", name) for name in names)
    return "".join(f"TABLE({match[1]})" for match in found if match)


def _knows(command: Sequence[str], flags: Sequence[str], work: str) -> bool:
    to = str(Path(work) / "flags.o")
    tried = [*command, *flags, "-x", "c++", "-c", os.devnull, "-o", to]
    return subprocess.run(tried, capture_output=True).returncode == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / library_name())
    parser.add_argument("--compiler", default="")
    parser.add_argument("--machine", default="")
    given = parser.parse_args()
    build(given.out, given.compiler.split(), given.machine)
