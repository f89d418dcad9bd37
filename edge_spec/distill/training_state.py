"""All that a training needs to go on exactly where it stopped: arrays in a file without code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.distill.tensor_file import group_of, read_unfinished, write_tensors
from edge_spec.storage.atomic import atomic_file


@dataclass(frozen=True)
class Evaluation:
    """Holds what was measured on held-out conversations after `step` steps. loss: mean of training
    since the evaluation before."""

    step: int
    loss: float
    of_position: tuple[float, ...]
    num_draft_tokens: int
    speedup: float


@dataclass(eq=False)
class TrainingState:
    """step: of those that are done. arrays: parameters, the optimizer's and the best ones, by names
    such as "best/NAME". losses: since the last evaluation."""

    step: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    history: list[Evaluation] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def best(self) -> Evaluation | None:
        return max(self.history, key=lambda each: each.speedup, default=None)

    def group(self, name: str) -> dict[str, np.ndarray]:
        """Returns the arrays "name/...", without that."""
        return group_of(self.arrays, name)

    def set_group(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays |= {f"{name}/{key}": values for key, values in arrays.items()}


def save_state(path: Path, state: TrainingState) -> None:
    """Raises StorageError where there is no space, OSError."""
    history = [asdict(each) for each in state.history]
    note = json.dumps({"step": state.step, "history": history, "losses": state.losses})
    with atomic_file(path) as work:
        write_tensors(work, state.arrays, note)


def load_state(path: Path) -> TrainingState | None:
    """Returns None where there is none, or a damaged one, which a warning says."""
    return read_unfinished(path, _state)


def _state(arrays: dict[str, np.ndarray], told: Any) -> TrainingState:
    history = [
        Evaluation(**{**each, "of_position": tuple(each["of_position"])})
        for each in told["history"]
    ]
    return TrainingState(int(told["step"]), arrays, history, list(told["losses"]))
