"""Imports the library of a runtime, or says what is wrong with it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from edge_spec.core.entry_points import quiet_import
from edge_spec.errors import MissingDependencyError


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
