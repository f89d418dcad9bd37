"""On which systems Apple's Core AI writes and runs programs: macOS and, as a check, Linux."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from edge_spec.errors import DeviceError, MissingDependencyError

FORMAT, PROGRAM = "coreai", "model.aimodel"
LIBRARY = "coreai-core"
VERSION = "1.0.0b3"  # its private calls are known (exporters/coreai/private.py)
INSTALL = f'Run: pip install "{LIBRARY}=={VERSION}".'
_ELSEWHERE = "Here, --runtime ort or llamacpp runs the model as it was published."
_MIN_GLIBC = "2.34"
_WRITING_MACOS, _RUNNING_MACOS = 26, 27


def require_writing() -> None:
    """Raises DeviceError, MissingDependencyError where programs cannot be written. Does not import
    the library."""
    problem = _system_problem(_WRITING_MACOS)
    if problem is not None:
        raise DeviceError(f"Core AI writes no programs here: {problem}", remedy=_ELSEWHERE)
    _require_version()


def require_running() -> None:
    """Raises DeviceError, MissingDependencyError where programs cannot be run."""
    problem = running_problem()
    if problem is not None:
        raise DeviceError(f"Core AI runs no programs here: {problem}", remedy=_ELSEWHERE)
    _require_version()


def is_mac() -> bool:
    return sys.platform == "darwin"


def running_problem() -> str | None:
    """Return why this system cannot run programs, or None if it can."""
    return _system_problem(_RUNNING_MACOS)


def _require_version() -> None:
    try:
        found = version(LIBRARY)
    except PackageNotFoundError:
        raise MissingDependencyError(f"{LIBRARY} is not installed", remedy=INSTALL) from None
    if found != VERSION:
        raise MissingDependencyError(
            f"{LIBRARY} {found} is installed, and edge-spec needs {VERSION}", remedy=INSTALL
        )


def _system_problem(least_macos: int) -> str | None:
    system, machine = sys.platform, platform.machine()
    if system == "darwin":
        macos = platform.mac_ver()[0]
        if machine == "arm64" and int(macos.partition(".")[0]) >= least_macos:
            return None
        return f"it needs macOS {least_macos} on Apple silicon, this is {macos} on {machine}"
    if system != "linux" or machine != "x86_64":
        return f"it needs a Mac, or Linux on x86-64, this is {system} on {machine}"
    library, found = platform.libc_ver()
    if library != "glibc" or _number(found) < _number(_MIN_GLIBC):
        here = f"{library} {found}" if library else "another C library"
        return f"it needs Linux with glibc {_MIN_GLIBC}, this one has {here}"
    return None


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
