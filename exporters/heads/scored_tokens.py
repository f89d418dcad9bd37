"""Reads which of the target's tokens a head scores, where it does not score all."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_spec.errors import ModelFileError, UsageError
from edge_spec.exporters.safetensors_reader import INTEGERS
from edge_spec.exporters.stored_tensor import StoredTensor


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
