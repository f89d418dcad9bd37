"""All that a training needs to go on exactly where it stopped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from edge_spec.distill.arrays import load_arrays, save_arrays

_log = logging.getLogger(__name__)


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
        prefix = name + "/"
        return {
            key.removeprefix(prefix): each
            for key, each in self.arrays.items()
            if key.startswith(prefix)
        }

    def set_group(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays |= {f"{name}/{key}": values for key, values in arrays.items()}


def save_state(path: Path, state: TrainingState) -> None:
    """Raises StorageError where there is no space, OSError."""
    history = [asdict(each) for each in state.history]
    note = {"step": state.step, "history": history, "losses": state.losses}
    save_arrays(path, state.arrays, note)


def load_state(path: Path) -> TrainingState | None:
    """Returns None where there is none, or a damaged one, which a warning says."""
    try:
        arrays, told = load_arrays(path)
        history = [
            Evaluation(**{**each, "of_position": tuple(each["of_position"])})
            for each in told["history"]
        ]
        return TrainingState(int(told["step"]), arrays, history, list(told["losses"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("training begins again: %s is damaged (%s)", path, error)
        return None
