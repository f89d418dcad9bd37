"""How the kernels are compiled, shown with compilers that write down what they are asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_spec.runtimes.llamacpp.rows import build, install, library

# Says which sources it was given, and fails as a compiler does for a flag that it does not know.
COMPILER = """
import sys
from pathlib import Path
*given, to = sys.argv[1:]
if {unknown!r} in given:
    raise SystemExit(f"error: unrecognized command-line option {unknown!r}")
tables = [flag for flag in given if flag.startswith("-DROWS_TABLES=")]
marks = [flag.split('"')[1] for flag in given if flag.startswith("-DROWS_MARK=")]
objects = [Path(name).read_text() for name in given if name.endswith(".o")]
source = [Path(name).name for name in given if name.endswith(".cpp")]
out = Path(to if "-o" == given[-1] else given[given.index("-o") + 1])
told = tables + marks if source == ["dispatch.cpp"] else []
out.write_text("\\n".join(objects + source + told))
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


def parts(library: Path) -> list[str]:
    lines = library.read_text().splitlines()
    return [line for line in lines if not line.startswith("compiled from ")]


def test_a_compiler_that_does_not_know_a_flag_leaves_out_one_table(
    tmp_path: Path, all_sources: Path
) -> None:
    build.build(tmp_path / "library", compiler(tmp_path, "-mavxvnni"), "x86_64")
    inside = parts(tmp_path / "library")
    assert "kernels_avxvnni.cpp" not in inside
    assert "-DROWS_TABLES=TABLE(avx512vnni)TABLE(avx2)TABLE(portable)" in inside
    assert {"kernels_avx512vnni.cpp", "kernels_avx2.cpp", "plugin.cpp"} <= set(inside)


def test_a_failure_leaves_what_was_there(tmp_path: Path, all_sources: Path) -> None:
    library = tmp_path / "library"
    library.write_text("before")
    with pytest.raises(subprocess.CalledProcessError):
        build.build(library, compiler(tmp_path, "-std=c++17"), "x86_64")
    with pytest.raises(OSError, match="not-there"):
        build.build(library, [str(tmp_path / "not-there")], "x86_64")
    assert library.read_text() == "before"
    assert [path.name for path in tmp_path.glob("*library*")] == ["library"]


def test_a_library_is_current_until_a_source_changes(tmp_path: Path, all_sources: Path) -> None:
    library = tmp_path / "library"
    assert not build.is_current(library)
    build.build(library, compiler(tmp_path), "x86_64")
    assert build.is_current(library)
    for change in ("// a comment", ""):
        source = all_sources / "plugin.cpp"
        kept = source.stat()
        source.write_text(change)
        os.utime(source, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # its age says nothing
        assert build.is_current(library) == (not change)


class TestLoading:
    """An editable checkout after a pull: the library is of the sources before it."""

    @pytest.fixture
    def built(
        self, tmp_path: Path, all_sources: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Path]:
        built = tmp_path / "library"
        build.build(built, compiler(tmp_path), "x86_64")
        (all_sources / "plugin.cpp").write_text("// pulled")
        monkeypatch.setattr(library, "path", lambda: built)
        library.library.cache_clear()
        yield built
        library.library.cache_clear()

    def test_the_library_is_compiled_again(
        self, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", " ".join(compiler(tmp_path)))
        with pytest.raises(OSError, match="library"):
            library.table()  # what that compiler writes is no library
        assert build.is_current(built)

    def test_it_is_not_loaded_where_it_cannot_be_compiled(
        self, built: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = built.read_bytes()
        monkeypatch.setenv("CXX", "/not/there")
        monkeypatch.delenv(install.VARIABLE, raising=False)
        found = install.install(None)
        assert found.table is None
        assert re.search("sources have changed.*: run .*build.py$", found.description)
        assert built.read_bytes() == before
