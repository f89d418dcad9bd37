"""Compiles the kernels for few rows (runtimes/llamacpp/rows) while the package is built.

All else stands in pyproject.toml. Without a C++ compiler the package is built as pure Python.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent
PACKAGE = Path("edge_spec", "runtimes", "llamacpp", "rows")  # in the wheel
SOURCES = Path("runtimes", "llamacpp", "rows")
# ggml's libraries for Windows do not export what the kernels are reached through.
HAS_KERNELS = sys.platform != "win32"


def _builder() -> ModuleType:
    """The script among the sources, which is no module while the package is built."""
    spec = importlib.util.spec_from_file_location("build_rows", ROOT / SOURCES / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildRows(Command):
    """Writes the shared library into the built package, or beside its sources for an editable
    installation. An older library never stays where compiling fails."""

    description = "compile the kernels for few rows"
    user_options = []  # noqa: RUF012
    editable_mode = False
    build_lib: str | None

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        builder = _builder()
        out = (ROOT / SOURCES if self.editable_mode else self._package()) / builder.library_name()
        if self.editable_mode and builder.is_current(out):
            return
        out.unlink(missing_ok=True)
        if not HAS_KERNELS:
            return
        try:
            builder.build(out)
        except (OSError, subprocess.CalledProcessError) as fault:
            lost = "rows of one pass will cost what llama.cpp's own kernels make them"
            print(f"no C++ compiler that works: {lost} ({fault})", file=sys.stderr)

    def _package(self) -> Path:
        assert self.build_lib is not None
        return Path(self.build_lib) / PACKAGE

    def get_source_files(self) -> list[str]:
        return [str(SOURCES / path.name) for path in _builder().sources()]

    def get_outputs(self) -> list[str]:
        library = self._package() / _builder().library_name()
        return [str(library)] if library.is_file() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_rows", None)]  # noqa: RUF012


class BdistWheel(bdist_wheel):
    """The wheel is for one kind of machine if the library is inside, and for every Python 3 there:
    the library is loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.bdist_dir, PACKAGE, _builder().library_name())
        self.root_is_pure = not library.is_file()
        _, _, machine = super().get_tag()
        # Python for macOS is for both of its processors, the library for one.
        return "py3", "none", machine.replace("universal2", platform.machine())


setup(cmdclass={"build": Build, "build_rows": BuildRows, "bdist_wheel": BdistWheel})
