"""Reads the text and JSON files of a Hugging Face directory, up to a size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_spec.errors import ModelFileError
from edge_spec.models.bundle import regular_size

MAX_TEXT_BYTES = 100_000_000  # of a file; a vocabulary of 260,000 tokens takes a third


def read_text(path: Path) -> str:
    """Returns what a file has, in UTF-8. Raises ModelFileError."""
    try:
        size = regular_size(path)
        if size > MAX_TEXT_BYTES:
            raise ModelFileError(
                f"{path} is larger than {MAX_TEXT_BYTES // 10**6} MB",
                remedy="Do not use this model.",
            )
        with path.open(encoding="utf-8") as file:
            return file.read(size)  # characters: no more than that, should it grow
    except FileNotFoundError:
        raise ModelFileError(
            f"no such file: {path}",
            remedy="Expected a Hugging Face directory with config.json, tokenizer.json and "
            "safetensors weights.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"cannot read {path}: {error}", remedy="Download the file again."
        ) from None


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """Returns an object. required: else a file that is missing is empty. Raises ModelFileError."""
    if not required and not path.exists():
        return {}
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} is not JSON: {error}", remedy="Download the file again."
        ) from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} holds no JSON object", remedy="Download the file again.")
    return values
