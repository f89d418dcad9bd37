"""Imports the library of a runtime, or says what is wrong with it; and picks one of its devices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from edge_spec.core.entry_points import quiet_import
from edge_spec.errors import MissingDependencyError, UsageError


def import_library(name: str, whole: str, install: str, reinstall: str | None = None) -> Any:
    """Returns the module, which is imported silently.

    whole: an attribute that it lacks where it is installed in part. install, reinstall: the
    remedies where it is missing, and where it is damaged. Raises MissingDependencyError.
    """
    remedy = reinstall or install
    try:
        with nullcontext() if name in sys.modules else quiet_import():
            library = import_module(name)
    except ModuleNotFoundError:
        raise MissingDependencyError(f"{name} is not installed", remedy=install) from None
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} is installed and does not load: {error}", remedy=remedy
        ) from error
    if not hasattr(library, whole):
        raise MissingDependencyError(f"{name} is installed in part", remedy=remedy)
    return library


def pick_device(library: str, wanted: Sequence[str], known: Iterable[str]) -> str | None:
    """Return the name of the one device that was asked for, None if none was. "gpu:0" is "gpu".
    Raises UsageError that lists the devices."""
    names = list(dict.fromkeys(name.lower().removesuffix(":0") for name in wanted))
    if len(names) > 1:
        raise UsageError(
            f"{library} puts a model on one device, not on {' and '.join(names)}",
            remedy="Name one of them.",
        )
    there = list(known)
    if names and names[0] not in there:
        raise UsageError(
            f"{library} has no device {names[0]!r} here",
            remedy=f"There are: {', '.join(there)}; edge-spec devices says more.",
        )
    return names[0] if names else None
