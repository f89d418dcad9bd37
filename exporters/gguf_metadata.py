"""Reads what a GGUF file states of its model, by keys."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_spec.errors import ModelFileError


class Metadata:
    """Typed look-ups that name the file when a value is missing or of another type."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, key: str, kind: type) -> Any:
        value = self.values.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        is_number = kind is not int or not isinstance(value, bool)
        if value is not None and not (isinstance(value, kind) and is_number):
            raise ModelFileError(
                f"{self.path}: {_cut(key)} is {reprlib.repr(value)}, expected {kind.__name__}",
                remedy="Convert the model again.",
            )
        return value

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ModelFileError(
                f"{self.path} lacks {_cut(key)}", remedy="Convert the model again."
            )
        return value


def _cut(key: str) -> str:
    """A key has the architecture's name in it, which may be any text."""
    return key if len(key) < 80 else reprlib.repr(key)
