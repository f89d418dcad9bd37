"""Makes the Vulkan backend for the llama-cpp-python that is installed, for tests without a GPU.

    python benchmarks/vulkan_backend.py DIRECTORY

Only the backend is compiled, from the same release's sources: a plain llama-cpp-python loads it
from GGML_BACKEND_PATH, so that no second wheel of it is made. It is written as DIRECTORY/VERSION.so
and made once for a version; the last line printed is its path. Takes CMake, Ninja, a C++ compiler
and the packages glslc and libvulkan1; headers of Vulkan, which have to be newer than Debian 12's,
are fetched from Debian without installing them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from ctypes.util import find_library
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from arm64_root import Apt

PACKAGE = "llama-cpp-python"
HEADERS = ("libvulkan-dev", "spirv-headers")
SOURCE = (
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    "http://deb.debian.org/debian trixie main\n"
)
TOOLS = ("cmake", "ninja", "c++", "glslc", "apt-get", "dpkg-deb")


def make_backend(path: Path) -> None:
    """Raises SystemExit without the tools, CalledProcessError where a step fails."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    loader = find_library("vulkan")
    if missing or loader is None:
        raise SystemExit(f"This takes {', '.join(missing) or 'the library of libvulkan1'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        work = Path(name)
        headers, sources = _headers(work), _sources(work)
        build = work / "build"
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CXX_FLAGS_RELEASE": "-O1",  # shaders are nearly all of it
            "CMAKE_PREFIX_PATH": headers,
            "Vulkan_INCLUDE_DIR": headers / "include",
            "Vulkan_LIBRARY": _library_path(loader),
            "GGML_BACKEND_DL": "ON",
            "GGML_VULKAN": "ON",
            "GGML_CPU": "OFF",
            "GGML_NATIVE": "OFF",  # it is kept, and may be read on another processor
            "GGML_CCACHE": "OFF",
            **{f"LLAMA_BUILD_{part}": "OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES")},
        }
        defined = [f"-D{key}={value}" for key, value in options.items()]
        _quietly("cmake", "-G", "Ninja", "-S", sources, "-B", build, *defined)
        _quietly("cmake", "--build", build, "--target", "ggml-vulkan")
        partial = path.with_suffix(f".{os.getpid()}")
        shutil.copyfile(build / "bin" / "libggml-vulkan.so", partial)
        partial.replace(path)


def _headers(work: Path) -> Path:
    """The directory that has include and share, of packages that are only unpacked."""
    apt = Apt(work / "apt", SOURCE)
    apt.run("download", *HEADERS)
    for package in (work / "apt").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, work / "headers"], check=True)
    return work / "headers" / "usr"


def _sources(work: Path) -> Path:
    wanted = f"{PACKAGE}=={version(PACKAGE)}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE]
    subprocess.run([*command, "--dest", work, wanted], check=True, stdout=sys.stderr)
    [archive] = work.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(work, filter="data")
    return work / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def _library_path(name: str) -> str:
    """Returns where the system has a library: its package for developers is not installed."""
    lines = subprocess.run(["ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    found = [line.split(" => ")[1] for line in lines.splitlines() if name in line.split()]
    return found[0]


def _quietly(*command: str | Path) -> None:
    """Shows the end of what a step printed where it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-20:]), file=sys.stderr)
        done.check_returncode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    path = parser.parse_args().directory.absolute() / f"{version(PACKAGE)}.so"
    if not path.is_file():
        make_backend(path)
    print(path)


if __name__ == "__main__":
    main()
