"""Reads what a GGUF file states of its model, by keys."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.gguf_reader import GgufFile


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


# By general.type (docs/gguf.md of ggml), and by general.architecture where files are older than it.
_OTHER_KINDS = {
    "adapter": ("a LoRA adapter", "Merge it into its model, and give that."),
    "mmproj": ("the part of a model that reads pictures", "Give the file of its text model."),
    "clip": ("the part of a model that reads pictures", "Give the file of its text model."),
    "imatrix": ("an importance matrix", "Give the model that it was measured on."),
}


def require_language_model(file: GgufFile) -> None:
    """Raises UnsupportedModelError for adapters, parts of models, and models that embed text."""
    architecture = file.metadata.get("general.architecture")
    kinds = (file.metadata.get("general.type"), architecture)
    known = (_OTHER_KINDS[kind] for kind in kinds if isinstance(kind, str) and kind in _OTHER_KINDS)
    found = next(known, None)
    if found is None and _embeds(file, architecture):
        found = ("a model that embeds text", "Give a model that writes text.")
    if found is not None:
        what, remedy = found
        raise UnsupportedModelError(f"{file.path} is {what}, not one that writes", remedy=remedy)


def _embeds(file: GgufFile, architecture: object) -> bool:
    """Returns whether tokens see those after them, or the rows of a text are pooled into one."""
    is_causal = file.metadata.get(f"{architecture}.attention.causal")
    pooling = file.metadata.get(f"{architecture}.pooling_type")
    return is_causal is False or (isinstance(pooling, int) and pooling > 0)


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


EAGLE3, DFLASH, ASSISTANT = "eagle3", "dflash", "gemma4-assistant"
HEAD_ARCHITECTURES = (EAGLE3, DFLASH, ASSISTANT)


def no_model(path: Path) -> UsageError:
    return UsageError(
        f"{path} is a trained head, which is no model of its own",
        remedy="Name the model that it was trained for, and the head as its --draft.",
    )
