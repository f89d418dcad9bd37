"""Makes a directory with an ARM64 Python and the libraries of edge-spec, for processors.py.

    python benchmarks/arm64_root.py DIRECTORY

apt-get fetches the packages of this Debian's or Ubuntu's own release into the directory, pip the
wheels, both without installing anything on this machine or being root; about 400 MB. qemu-aarch64
runs it on a machine of another kind.
"""

from __future__ import annotations

import argparse
import compileall
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path
from types import MappingProxyType

ROOT, SITE = "root", "site"  # within the directory
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
# Of a release that is called {0}. Where ARM64 packages are, and what they are signed with.
SOURCES = MappingProxyType(
    {
        "debian": "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
        "http://deb.debian.org/debian {0} main\n",
        "ubuntu": "deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] "
        "http://ports.ubuntu.com/ubuntu-ports {0} main\n",
    }
)
GLIBC_MINORS = range(17, 36)  # of the wheels that are taken
# An emulated process would read the real machine's files otherwise, which are of a processor of
# another kind: the library by which onnxruntime knows processors does not survive that. They name
# one processor and no maker, so that what counts is what the system says that it can do.
PROCESSOR = MappingProxyType(
    {
        "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 100.00\nCPU implementer\t: 0x00\n"
        "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0x051\nCPU revision\t: 1\n\n",
        "sys/devices/system/cpu/present": "0\n",
        "sys/devices/system/cpu/possible": "0\n",
    }
)


class Apt:
    """Fetches packages of one source into a directory of its own; nothing is installed.

    source: a line of sources.list. Raises CalledProcessError where a download fails.
    """

    def __init__(self, work: Path, source: str, architecture: str | None = None) -> None:
        self._work = work
        for name in ("lists/partial", "archives/partial"):
            (work / name).mkdir(parents=True)
        (work / "sources.list").write_text(source, encoding="ascii")
        settings = {
            "Dir::State": work,
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": work,
            "Dir::Etc::sourcelist": work / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",  # the usual one may not read the directory
            "Debug::NoLocking": "true",
        }
        if architecture is not None:
            settings |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
        self._command = ["apt-get", "-qq"]
        for name, value in settings.items():
            self._command += ["-o", f"{name}={value}"]
        self.run("update")

    def run(self, *arguments: str) -> None:
        """apt-get with these arguments, in the directory."""
        command = [*self._command, *arguments]
        subprocess.run(command, check=True, cwd=self._work, stdout=subprocess.DEVNULL)


def python_of(directory: Path) -> Path:
    return directory / ROOT / "usr" / "bin" / "python3"


def make_root(directory: Path) -> None:
    """Raises SystemExit on a system without apt-get, CalledProcessError where a download fails."""
    system = platform.freedesktop_os_release()
    if shutil.which("apt-get") is None or system["ID"] not in SOURCES:
        raise SystemExit(f"This takes apt-get on {' or '.join(SOURCES)}.")
    source = SOURCES[system["ID"]].format(system["VERSION_CODENAME"])
    for package in _fetched(directory / "apt", source):
        subprocess.run(["dpkg-deb", "-x", package, directory / ROOT], check=True)
    shutil.rmtree(directory / "apt")
    for name, text in PROCESSOR.items():
        path = directory / ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    _compile_library(directory)
    _install_wheels(directory)


def _compile_library(directory: Path) -> None:
    """Packages have no bytecode, and an emulated Python would take seconds at each start to make
    its own. It ignores this machine's where that is of another version."""
    library = python_of(directory).resolve().name
    compileall.compile_dir(directory / ROOT / "usr" / "lib" / library, quiet=2)


def _fetched(work: Path, source: str) -> list[Path]:
    """The packages and all that they need, fetched as if nothing was installed."""
    apt = Apt(work, source, "arm64")
    (work / "status").touch()
    apt.run(
        *("-o", f"Dir::State::status={work / 'status'}"),
        *("install", "--yes", "--download-only", *PACKAGES),
    )
    return sorted((work / "archives").glob("*.deb"))


def _install_wheels(directory: Path) -> None:
    """Installs what edge-spec needs, in the versions that are installed here."""
    needed = [text for text in requires("edge-spec") or () if "extra ==" not in text]
    names = [re.match(r"[\w.-]+", text) for text in needed]
    wanted = ["onnxruntime", *(found[0] for found in names if found)]
    python = python_of(directory).resolve().name.removeprefix("python")
    tags = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in GLIBC_MINORS)]
    command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:"]
    command += ["--target", str(directory / SITE), "--python-version", python]
    command += [f"--platform={tag}_aarch64" for tag in tags]
    subprocess.run([*command, *(f"{name}=={version(name)}" for name in wanted)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    make_root(parser.parse_args().directory.absolute())


if __name__ == "__main__":
    main()
