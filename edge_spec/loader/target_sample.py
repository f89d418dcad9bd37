"""Tells a head's own target from another model of the same shape: a head keeps some numbers of its
target's weights, which are nearly the same in every form of that model and others in another model.

A fine-tune that has moved its weights by less than the tolerance is not told apart: a head mostly
drafts well for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from edge_spec.core.heads import DFlashHead, TrainedHead
from edge_spec.core.model_info import TensorRows
from edge_spec.errors import EdgeSpecError, UsageError

SAMPLE = "target_sample"  # of a head's config.json: rows of numbers, by names of tensors
_PLACES = (0.05, 0.2, 0.35, 0.5)  # of rows: neither special tokens nor padding
_COLUMNS = 32
# How long the difference is beside the numbers: two bits make 0.3, weights of another model 1.4.
_TOLERANCE = 0.4
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LARGEST_CONFIG = 1_000_000  # bytes


def target_sample(weights: TensorRows) -> dict[str, list[list[float]]]:
    """Returns what a head keeps of its target: some of the embedding, of the output matrix and of a
    layer in the middle, as far as they can be read."""
    middle = f"model.layers.{weights.config.num_layers // 2}.mlp.down_proj.weight"
    found = {name: _read(weights, name) for name in (_EMBEDDING, _OUTPUT, middle)}
    return {
        name: [[float(f"{value:.4g}") for value in row] for row in rows.tolist()]
        for name, rows in found.items()
        if rows is not None
    }


def require_own_target(path: Path, head: TrainedHead, weights: Callable[[], TensorRows]) -> None:
    """weights: the target's, which are opened where the head has something to compare with; where
    they cannot be, nothing is. Raises UsageError for the head of another model."""
    kept = dict(_kept(path, head))
    if not kept:
        return
    try:
        tensors = weights()
    except EdgeSpecError:
        return
    for name, expected in kept.items():
        found = _read(tensors, name)
        if found is None or found.shape != expected.shape:
            continue
        if np.linalg.norm(found - expected) > _TOLERANCE * np.linalg.norm(expected):
            raise UsageError(
                f"{path} is a head for another target: it is of this shape, but its {name} has "
                "other numbers",
                remedy="Use the head with the model that it was trained for.",
            )


def _kept(path: Path, head: TrainedHead) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what a head has of its target: what it keeps to be compared, or a copy of the
    embedding, which DSpark heads have."""
    if isinstance(head, DFlashHead) and head.embed_rows is not None:
        yield _EMBEDDING, head.embed_rows(_rows(head.config.vocab_size))[:, :_COLUMNS]
    try:
        with (path / "config.json").open("rb") as file:
            stated = json.loads(file.read(_LARGEST_CONFIG)).get(SAMPLE, {})
        for name, rows in stated.items():
            yield str(name), np.asarray(rows, np.float32)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return  # a head that keeps nothing that can be compared


def _read(weights: TensorRows, name: str) -> np.ndarray | None:
    """Returns [rows, columns] of a matrix, None where there is none of this name."""
    config = weights.config
    count = config.vocab_size if name in (_EMBEDDING, _OUTPUT) else config.hidden_size
    try:
        return weights.float32_rows(name, _rows(count))[:, :_COLUMNS]
    except (KeyError, IndexError):
        return None


def _rows(count: int) -> np.ndarray:
    return np.array([int(count * place) for place in _PLACES], np.int64)
