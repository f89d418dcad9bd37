"""Holds what a trained head is read from, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.stored_tensor import StoredTensor


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """The files of a head, or of a model that brings one, and the target that it is read for."""

    path: Path
    values: Mapping[str, Any]  # of config.json, or by its keys
    tensors: Mapping[str, StoredTensor]  # of all files
    target: ModelConfig
    has_weights: bool  # else they stay unread, for a look at the head alone
