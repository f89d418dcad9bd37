"""Holds what a trained head is read from, whichever kind it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.exporters.safetensors_reader import INTEGERS
from edge_spec.exporters.stored_tensor import StoredTensor


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """The files of a head, or of a model that brings one, and the target that it is read for."""

    path: Path
    values: Mapping[str, Any]  # of config.json, or by its keys
    tensors: Mapping[str, StoredTensor]  # of all files
    target: ModelConfig
    has_weights: bool  # else they stay unread, for a look at the head alone


class StoredTensors(Mapping[str, np.ndarray]):
    """Reads a tensor as float32 whenever it is asked for, and keeps none."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].float32()

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def scored_tokens(path: Path, offsets: StoredTensor, vocab_size: int) -> np.ndarray:
    """Returns the target's id of each scored token, [tokens] int64. offsets: `d2t`, how much larger
    it is than the head's own. Raises ModelFileError for what is no list of numbers, UsageError for
    ids that the target has not."""
    if offsets.kind is not INTEGERS["I64"][0] or len(offsets.shape) != 1:
        raise ModelFileError(
            f"{path}: d2t is no list of 64-bit numbers", remedy="Download the head again."
        )
    ids = np.frombuffer(offsets.data.tobytes(), np.int64) + np.arange(offsets.shape[0])
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < len(ids):
        raise UsageError(
            f"{path}: d2t names a token twice, or one beyond the target's vocabulary of "
            f"{vocab_size}",
            remedy="Use the head with the model that it was trained for.",
        )
    return ids


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def count(path: Path, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise unusable(path, f"usable {name}")
    return value


def unusable(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path}: config.json has no {what}", remedy="Download the head again.")
