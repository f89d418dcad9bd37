"""The kernels on processors that this machine is not, which qemu's user mode emulates.

Needs qemu-x86_64 and qemu-aarch64 (apt-get install qemu-user), and for machines of the other kind
a compiler (apt-get install g++-aarch64-linux-gnu). AVX-512 and AVX-VNNI are not emulated: those
tables are compared where a processor has them.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_spec.runtimes.llamacpp.rows import build
from fixtures import rows

PROGRAM = Path(__file__).with_name("rows_tables.cpp")
# qemu's name of a processor, the machine, and the tables that it runs.
PROCESSORS = (
    ("Nehalem", "x86_64", ("portable",)),
    ("Haswell", "x86_64", ("avx2", "portable")),
    ("max", "x86_64", ("avx2", "portable")),
    ("cortex-a72", "aarch64", ("portable",)),
    ("neoverse-n1", "aarch64", ("dotprod", "portable")),
    ("max", "aarch64", ("dotprod", "portable")),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def compiler(machine: str) -> str:
    return "c++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"


@functools.cache
def compiled(machine: str, directory: Path) -> tuple[Path, Path]:
    """The program and the library for a machine."""
    program, library = directory / f"program-{machine}", directory / f"{machine}.so"
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{build.HERE}"]
    command = [compiler(machine), *options, str(PROGRAM), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    if machine == platform.machine():
        return program, rows.library_path()
    build.build(library, [compiler(machine)], machine)
    return program, library


def run(command: list[str], machine: str, directory: Path) -> dict[str, list[str]]:
    """The program's lines by their first words."""
    program, library = compiled(machine, directory)
    done = subprocess.run(
        [*command, str(program), str(library)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: rest for name, *rest in (line.split() for line in done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "machine", "tables"), PROCESSORS)
def test_every_table_has_the_bits_of_the_portable_one(
    processor: str, machine: str, tables: tuple[str, ...], directory: Path
) -> None:
    """All types of weights times 1 to 16 rows, and of cells with attention of 1 to 8; sizes are no
    multiples of tiles."""
    missing = [
        name for name in (f"qemu-{machine}", compiler(machine)) if shutil.which(name) is None
    ]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    command = [f"qemu-{machine}", "-cpu", processor]
    if machine != platform.machine():
        command += ["-L", f"/usr/{machine}-linux-gnu"]
    found = run(command, machine, directory)
    assert found.pop("best") == [tables[0]]
    assert tuple(name for name, (state, *_) in found.items() if state == "runs") == tables
    for name in tables:
        compared, differing, attended, differing_there = map(int, found[name][1:])
        assert min(compared, attended) > 10_000 and differing == differing_there == 0, found
