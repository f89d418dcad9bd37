"""Training in PyTorch: the same steps, whether or not it is interrupted between them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_spec.core.model import Progress
from edge_spec.distill.features import (
    Example,
    Window,
    batch_of,
    in_batches,
    load_arrays,
    save_arrays,
    shuffled,
    windows_of,
)
from edge_spec.distill.forecast import Acceptance, Forecast, measured_acceptance
from edge_spec.distill.trainees import Teacher, Trainee, as_arrays, loss_of
from edge_spec.models.devices import return_freed

_BETAS, _CLIP, _WARM_UP, _LEAST_RATE = (0.9, 0.95), 0.5, 0.04, 0.1
# Batches differ in size, so that the holes between what glibc keeps of them would grow to several
# times what a step needs.
_STEPS_UNTIL_RETURNED = 32
Judge = Callable[[Acceptance], Forecast]
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


@dataclass(frozen=True)
class TrainingOptions:
    """rate: the largest. window: rows of one text that a step sees. rows: of a step. patience:
    evaluations without a better forecast, after which it ends."""

    epochs: int
    rate: float
    window: int = 512
    rows: int = 2048
    evaluations: int = 8
    patience: int = 4
    seed: int = 0
    kept_every_s: float = math.inf  # beside each evaluation


class Training:
    """Trains on examples and judges by held-out ones; `path` keeps where it is."""

    def __init__(
        self, trainee: Trainee, teacher: Teacher, options: TrainingOptions, path: Path, judge: Judge
    ) -> None:
        self._trainee = trainee
        self._teacher = teacher
        self._options = options
        self._path = path
        self._judge = judge
        self._parameters = list(trainee.parameters.values())
        self._optimizer: Any = torch.optim.AdamW(
            self._parameters, lr=options.rate, betas=_BETAS, fused=True
        )
        self._state = self._restored()
        self._kept_s = time.monotonic()

    def run(self, examples: Sequence[Example], progress: Progress) -> TrainingState:
        """Leaves the best parameters in the trainee. An interrupt keeps the steps until then.
        Raises StorageError, OSError."""
        options, state = self._options, self._state
        learnt = [each for each in examples if not each.conversation.is_held_out]
        windows = windows_of(learnt, options.window)
        held_out = windows_of(
            [each for each in examples if each.conversation.is_held_out], options.window
        )
        an_epoch = len(shuffled(windows, options.rows, options.seed, 0))
        total = an_epoch * options.epochs
        every = max(1, total // options.evaluations)
        batches: list[list[Window]] = []
        try:
            if not state.history:
                self._evaluate(held_out)
            while state.step < total and not self._has_converged():
                progress(self._told(), state.step / total)
                epoch, at = divmod(state.step, an_epoch)
                if not batches or at == 0:
                    batches = shuffled(windows, options.rows, options.seed, epoch)
                self._step(batches[at % len(batches)], total)
                if state.step % _STEPS_UNTIL_RETURNED == 0:
                    return_freed()
                if state.step % every == 0 or state.step == total:
                    self._evaluate(held_out)
                    self._save()
                elif time.monotonic() - self._kept_s > options.kept_every_s:
                    self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        self._take(state.group("best"))
        return state

    def _step(self, windows: Sequence[Window], total: int) -> None:
        state = self._state
        loss = loss_of(self._trainee, self._teacher, batch_of(windows, self._trainee.num_positions))
        self._optimizer.zero_grad()
        if loss.requires_grad:  # else nothing of the batch is scored
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, _CLIP)
            for group in self._optimizer.param_groups:
                group["lr"] = self._options.rate * rate_at(state.step, total)
            self._optimizer.step()
        state.losses.append(float(loss.detach()))
        state.step += 1

    def _evaluate(self, windows: Sequence[Window]) -> None:
        state = self._state
        acceptance = held_out_acceptance(self._trainee, windows, self._options.rows)
        forecast = self._judge(acceptance)
        loss = float(np.mean(state.losses)) if state.losses else math.nan
        best = state.best
        if best is None or forecast.speedup > best.speedup:
            state.set_group("best", as_arrays(self._trainee.parameters))
        state.history.append(Evaluation(state.step, loss, acceptance.of_position, *forecast))
        state.losses.clear()

    def _has_converged(self) -> bool:
        speedups = [each.speedup for each in self._state.history]
        since_best = len(speedups) - 1 - int(np.argmax(speedups))
        return since_best >= self._options.patience

    def _told(self) -> str:
        last = self._state.history[-1]
        chances = "/".join(f"{100 * each:.0f}" for each in last.of_position)
        return f"Training ({chances} % accepted by position)"

    def _save(self) -> None:
        state = self._state
        state.set_group("parameters", as_arrays(self._trainee.parameters))
        for name, each in self._trainee.parameters.items():
            kept = self._optimizer.state.get(each, {})
            state.set_group(
                f"optimizer/{name}",
                {key: value.cpu().numpy().copy() for key, value in kept.items()},
            )
        save_state(self._path, state)
        self._kept_s = time.monotonic()

    def _restored(self) -> TrainingState:
        state = load_state(self._path) or TrainingState()
        self._take(state.group("parameters"))
        for name, each in self._trainee.parameters.items():
            kept = state.group(f"optimizer/{name}")
            if kept:
                self._optimizer.state[each] = {
                    key: torch.as_tensor(values.copy()) for key, values in kept.items()
                }
        return state

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, values in arrays.items():
                self._trainee.parameters[name].copy_(torch.as_tensor(values))


def rate_at(step: int, total: int) -> float:
    """Rises over the first few steps, then falls as a cosine; of the largest rate."""
    warm = max(1, int(total * _WARM_UP))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def held_out_acceptance(trainee: Trainee, windows: Sequence[Window], rows: int) -> Acceptance:
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for each in in_batches(windows, rows):
        batch = batch_of(each, trainee.num_positions)
        with torch.no_grad():
            drafts = trainee.drafts(batch)
        ends = np.cumsum(batch.anchors.sum(axis=1))[:-1]  # of the windows
        of_windows = (np.split(values, ends) for values in (drafts, batch.written[batch.anchors]))
        found += zip(*of_windows, strict=True)
    return measured_acceptance(found)
