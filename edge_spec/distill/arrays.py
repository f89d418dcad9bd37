"""Arrays in files that run nothing when they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from edge_spec.storage.atomic import atomic_file


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], note: object = None, mode: int = 0o644
) -> None:
    """note: what JSON can hold. Raises StorageError where there is no space, OSError."""
    stored: dict[str, Any] = {**arrays, "note": np.array(json.dumps(note))}
    with atomic_file(path, mode) as work, work.open("wb") as file:
        np.savez(file, **stored)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the arrays and the note. Raises ValueError for a file that is not whole, OSError."""
    try:
        with path.open("rb") as file, np.load(file) as stored:  # which refuses pickles
            arrays = dict(stored)
        return arrays, json.loads(str(arrays.pop("note")))
    except (AttributeError, BadZipFile, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from None
