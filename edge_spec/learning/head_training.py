"""One training from its begin to its end, which may lie in several processes: where it is, is kept
every few seconds, and an interruption costs what came after that."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.distill.tensor_file import group_of, read_unfinished, write_tensors
from edge_spec.learning.texts import PRIVATE
from edge_spec.learning.training import Examples, Heads, Teacher
from edge_spec.storage.atomic import atomic_file

KEPT_EVERY_S = 10.0
_EPOCHS, _MOST_STEPS = 6, 600
_LEAST_STEPS, _LEAST_ROWS, _MOST_ROWS = 40, 32, 256  # of an epoch; of a step
_FIRST_RATE, _RATE, _LEAST_RATE = 2e-3, 1e-3, 0.1  # of untrained heads, of others; the last one
_PATIENCE = 2  # epochs without a lower loss of what is held out
_LEAST_HELD_OUT = 64  # rows, of which a loss says something


@dataclass(eq=False)
class HeadTraining:
    """Trains heads, which may take several processes. until: the number of the first text that it
    does not learn from. spent: processor seconds, told and set back whenever it is kept."""

    heads: Heads
    until: int
    is_first: bool
    step: int = 0
    best: dict[str, np.ndarray] | None = None
    best_loss: float = math.inf
    worse: int = 0  # epochs since

    def run(
        self,
        teacher: Teacher,
        learnt: Examples,
        held_out: Examples | None,
        may_go_on: Callable[[], bool],
        keep: Callable[[HeadTraining], None],
    ) -> bool:
        """Returns whether it came to its end; else `may_go_on` was false. keep: raises where it may
        not be written, or cannot."""
        rows = min(_MOST_ROWS, max(_LEAST_ROWS, len(learnt) // _LEAST_STEPS))
        epoch = math.ceil(len(learnt) / rows)
        total = min(_EPOCHS * epoch, _MOST_STEPS)
        kept_s = time.monotonic()
        while self.step < total and self.worse < _PATIENCE:
            if not may_go_on():
                keep(self)
                return False
            at = self.step % epoch
            order = np.random.default_rng([self.until, self.step // epoch]).permutation(len(learnt))
            self.heads.learn(teacher, learnt, order[at * rows : (at + 1) * rows], self._rate(total))
            self.step += 1
            if self.step % epoch == 0 or self.step == total:
                self._judge(teacher, held_out)
            if time.monotonic() - kept_s > KEPT_EVERY_S:
                keep(self)
                kept_s = time.monotonic()
        return True

    def result(self) -> dict[str, np.ndarray]:
        return self.heads.parameters if self.best is None else self.best

    def _judge(self, teacher: Teacher, held_out: Examples | None) -> None:
        """Keeps the best parameters; without anything held out, the last ones stay."""
        if held_out is None or len(held_out) < _LEAST_HELD_OUT:
            return
        rows = np.arange(len(held_out))[-4 * _MOST_ROWS :]
        loss = self.heads.loss(teacher, held_out, rows)
        if loss < self.best_loss:
            self.best, self.best_loss, self.worse = self.heads.copy(), loss, 0
        else:
            self.worse += 1

    def _rate(self, total: int) -> float:
        """Falls as a cosine."""
        largest = _FIRST_RATE if self.is_first else _RATE
        share = (1 + math.cos(math.pi * self.step / total)) / 2
        return largest * (_LEAST_RATE + (1 - _LEAST_RATE) * share)


def save_training(path: Path, training: HeadTraining) -> None:
    """Raises StorageError where there is no space, OSError."""
    heads = training.heads
    arrays = {f"parameters/{name}": each for name, each in heads.parameters.items()}
    arrays |= {f"moments/{name}": each for name, each in heads.moments.items()}
    arrays |= {f"best/{name}": each for name, each in (training.best or {}).items()}
    note = {
        "until": training.until,
        "is_first": training.is_first,
        "step": training.step,
        "optimizer_step": heads.step,
        "best_loss": None if training.best is None else training.best_loss,
        "worse": training.worse,
    }
    with atomic_file(path, PRIVATE) as work:
        write_tensors(work, arrays, json.dumps(note))


def load_training(path: Path, hidden_size: int) -> HeadTraining | None:
    """Returns None where there is none, or none that is whole and of this width, which a warning
    says."""

    def build(arrays: dict[str, np.ndarray], said: Any) -> HeadTraining:
        moments = group_of(arrays, "moments")
        heads = Heads(group_of(arrays, "parameters"), moments, int(said["optimizer_step"]))
        require_shapes(heads.parameters, hidden_size)
        loss = said["best_loss"]
        return HeadTraining(
            heads,
            int(said["until"]),
            bool(said["is_first"]),
            int(said["step"]),
            group_of(arrays, "best") or None,
            math.inf if loss is None else float(loss),
            int(said["worse"]),
        )

    return read_unfinished(path, build)


def require_shapes(parameters: dict[str, np.ndarray], hidden_size: int) -> None:
    """Raises ValueError for parameters of another target, or that are no numbers."""
    wanted = Heads.untrained(hidden_size).parameters
    for name, values in wanted.items():
        if name not in parameters or parameters[name].shape != values.shape:
            raise ValueError(f"{name} is missing or of another width")
        if not np.isfinite(parameters[name]).all():
            raise ValueError(f"{name} has values that are no numbers")
    if len(parameters) > len(wanted):
        raise ValueError("it has tensors too many")
