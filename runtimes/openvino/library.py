"""openvino, where it is installed, without what it would report."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from typing import Any

from edge_spec.core.entry_points import quiet_import
from edge_spec.errors import MissingDependencyError

_TELEMETRY = "openvino_telemetry"
_INSTALL = 'Run: pip install "edge-spec[openvino]".'


def import_openvino() -> Any:
    """Returns the module. Importing it would send an event to Google Analytics where the user has
    not declined; without its module `openvino_telemetry`, which is kept from loading in this
    process, it takes a stub of its own that sends nothing. Raises MissingDependencyError."""
    sys.modules.setdefault(_TELEMETRY, None)  # type: ignore[arg-type]  # importing it fails
    try:
        with quiet_import():
            import openvino
    except ModuleNotFoundError:
        raise MissingDependencyError("openvino is not installed", remedy=_INSTALL) from None
    except ImportError as error:
        raise MissingDependencyError(
            f"openvino is installed and does not load: {error}", remedy=_INSTALL
        ) from error
    if not hasattr(openvino, "Core"):
        raise MissingDependencyError("openvino is installed in part", remedy=_INSTALL)
    return openvino


@cache
def core() -> Any:
    """Returns openvino's Core, one a process: each loads the plugins again. Raises as above."""
    return import_openvino().Core()


def told(core: Any, device: str, name: str) -> Any:
    """Returns a property of a device; None where its plugin does not have it."""
    with suppress(RuntimeError):
        return core.get_property(device, name)
    return None


def last_line(error: Exception) -> str:
    """OpenVINO's messages begin with lines that name its own files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
