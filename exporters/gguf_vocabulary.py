"""Reads the lists of a GGUF file that have an entry for each token."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.errors import ModelFileError

# What llama.cpp takes them in: it refuses other files.
_COLUMNS = {"token_type": ("int32",), "scores": ("float32", "int32")}


def token_texts(metadata: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Returns the tokens and their ids in order, with llama.cpp's names for empty ones. Raises
    ModelFileError."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not {*map(type, tokens)} <= {str}:
        raise damaged(path, "it has no list of tokens")
    if not tokens:
        raise damaged(path, "it has no tokens")
    ids: dict[str, int] = {}
    for at, token in enumerate(tokens):
        first = ids.setdefault(token or f"[EMPTY_{at}]", at)
        if first != at:
            text = reprlib.repr(token)
            raise damaged(
                path, f"it has two with the same text {text}, the tokens {first} and {at}"
            )
    return ids


def column(metadata: Mapping[str, Any], path: Path, key: str, count: int) -> np.ndarray | None:
    """Returns a number of each token, None where the file has none. As in llama.cpp, numbers of
    more tokens than there are do no harm. Raises ModelFileError."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    kind = str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__
    if kind not in _COLUMNS[key]:
        told = " or ".join(_COLUMNS[key])
        raise damaged(path, f"its {key} for each of its {count} tokens are {kind}, expected {told}")
    if len(values) < count:
        raise damaged(path, f"it lacks {key} for each of its {count} tokens, and has {len(values)}")
    used: np.ndarray = values[:count]
    return used


def damaged(path: Path, what: str) -> ModelFileError:
    """Returns the error for a vocabulary that cannot be used."""
    where = f"the vocabulary of {path} is damaged"
    return ModelFileError(f"{where}: {what}", remedy="Download or convert the file again.")
