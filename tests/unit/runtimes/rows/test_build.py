"""How the kernels are compiled, shown with compilers that write down what they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_spec.runtimes.llamacpp.rows import build

# Says which sources it was given, and fails as a compiler does for a flag that it does not know.
COMPILER = """
import sys
from pathlib import Path
*given, to = sys.argv[1:]
if {unknown!r} in given:
    raise SystemExit(f"error: unrecognized command-line option {unknown!r}")
tables = [flag for flag in given if flag.startswith("-DROWS_TABLES=")]
objects = [Path(name).read_text() for name in given if name.endswith(".o")]
source = [Path(name).name for name in given if name.endswith(".cpp")]
out = Path(to if "-o" == given[-1] else given[given.index("-o") + 1])
out.write_text("\\n".join(objects + source + (tables if source == ["dispatch.cpp"] else [])))
"""


def compiler(directory: Path, unknown: str = "-never") -> list[str]:
    script = directory / "compiler.py"
    script.write_text(COMPILER.format(unknown=unknown))
    return [sys.executable, str(script)]


@pytest.fixture
def all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of empty files in the place of the sources."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in (*build.BY_MACHINE["x86_64"], *build.EVERYWHERE):
        (folder / name).touch()
    monkeypatch.setattr(build, "HERE", folder)
    return folder


def test_every_table_of_the_machine_is_in_the_library(tmp_path: Path, all_sources: Path) -> None:
    build.build(tmp_path / "library", compiler(tmp_path), "x86_64")
    inside = (tmp_path / "library").read_text().split()
    tables = [line for line in inside if line.startswith("-D")]
    assert tables == [
        "-DROWS_TABLES=TABLE(avx512vnni)TABLE(avxvnni)TABLE(avx2)TABLE(portable)",
    ]
    assert set(inside) - set(tables) == {*build.BY_MACHINE["x86_64"], *build.EVERYWHERE}


def test_a_compiler_that_does_not_know_a_flag_leaves_out_one_table(
    tmp_path: Path, all_sources: Path
) -> None:
    build.build(tmp_path / "library", compiler(tmp_path, "-mavxvnni"), "x86_64")
    inside = (tmp_path / "library").read_text().split()
    assert "kernels_avxvnni.cpp" not in inside
    assert "-DROWS_TABLES=TABLE(avx512vnni)TABLE(avx2)TABLE(portable)" in inside
    assert {"kernels_avx512vnni.cpp", "kernels_avx2.cpp", "plugin.cpp"} <= set(inside)


def test_an_unknown_machine_has_the_portable_table_alone(tmp_path: Path, all_sources: Path) -> None:
    build.build(tmp_path / "library", compiler(tmp_path), "riscv64")
    inside = (tmp_path / "library").read_text().split()
    assert set(inside) == {*build.EVERYWHERE, "-DROWS_TABLES=TABLE(portable)"}


def test_a_failure_leaves_what_was_there(tmp_path: Path, all_sources: Path) -> None:
    library = tmp_path / "library"
    library.write_text("before")
    with pytest.raises(subprocess.CalledProcessError):
        build.build(library, compiler(tmp_path, "-std=c++17"), "x86_64")
    with pytest.raises(OSError, match="not-there"):
        build.build(library, [str(tmp_path / "not-there")], "x86_64")
    assert library.read_text() == "before"
    assert [path.name for path in tmp_path.glob("*library*")] == ["library"]


def test_a_library_older_than_a_source_is_not_current(tmp_path: Path, all_sources: Path) -> None:
    library = tmp_path / "library"
    assert not build.is_current(library)
    library.touch()
    made_of = [Path(build.__file__), *all_sources.iterdir()]
    younger = max(path.stat().st_mtime for path in made_of) + 1
    os.utime(library, (younger, younger))
    assert build.is_current(library)
    os.utime(all_sources / "plugin.cpp", (younger + 1, younger + 1))
    assert not build.is_current(library)
