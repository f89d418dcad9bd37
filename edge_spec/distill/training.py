"""Train a drafter in PyTorch; interrupts between steps do not change the result."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_spec.core.model import Progress
from edge_spec.core.model_info import TensorRows
from edge_spec.distill.answers import count_answered, coverage
from edge_spec.distill.features import (
    Example,
    Window,
    batch_of,
    in_batches,
    load_arrays,
    save_arrays,
    shuffle_batches,
    windows_of,
)
from edge_spec.distill.forecast import Acceptance, best_chain, measure_acceptance
from edge_spec.distill.request import KINDS, DistillRequest
from edge_spec.distill.trainees import (
    Drafter,
    Teacher,
    Trainee,
    as_arrays,
    fast_products,
    loss_of,
    make_trainee,
)
from edge_spec.drafters.protocol import named, part_of
from edge_spec.loader.head import StoredTables
from edge_spec.models.devices import return_freed
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.machine import describe_machine
from edge_spec.storage.atomic import scratch_beside

_WINDOW = 512  # rows of one text in a training step
_LEAST_STEPS = 40  # per epoch,
_LEAST_ROWS = 32  # unless steps would have fewer rows
_EVALUATIONS = 8
_PATIENCE = 4  # evaluations without a better forecast that end a training
_BETAS, _CLIP, _WARM_UP, _LEAST_RATE = (0.9, 0.95), 0.5, 0.04, 0.1
# Batches differ in size, so glibc's free memory would fragment to several times what a step needs.
_STEPS_UNTIL_RETURNED = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a drafter learns from, and how.

    - weights: the target's; all of them for a kind that starts as a layer of it.
    - token_ids: scored, ascending.
    - passes_s: seconds of the target's passes here, by rows.
    - time_drafter: measures a draft token's seconds for the drafter in a directory.
    - folder: stores the unfinished training.
    - threads: None: PyTorch's choice.
    - name: of the training; "": derived from all that decides it.
    - save_every_s: besides each evaluation.
    """

    examples: Sequence[Example]
    weights: TensorRows
    token_ids: np.ndarray
    passes_s: Mapping[int, float]
    time_drafter: Callable[[Path], float]
    folder: Path
    threads: int | None = None
    name: str = ""
    save_every_s: float = math.inf

    @property
    def divided(self) -> tuple[list[Example], list[Example]]:
        """Training examples, and held-out ones."""
        held_out = [each for each in self.examples if each.conversation.is_held_out]
        return [each for each in self.examples if not each.conversation.is_held_out], held_out


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out conversations after `step` steps. loss: mean since the last
    evaluation."""

    step: int
    loss: float
    of_position: tuple[float, ...]
    num_draft_tokens: int
    speedup: float


@dataclass(eq=False)
class TrainingState:
    """step: number of finished steps. arrays: current parameters, the optimizer's and the best ones
    ("best/NAME"). losses: since the last evaluation."""

    step: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    history: list[Evaluation] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def best(self) -> Evaluation | None:
        return max(self.history, key=lambda each: each.speedup, default=None)

    def save(self, path: Path) -> None:
        """Raises StorageError if the disk is full, OSError."""
        history = [asdict(each) for each in self.history]
        save_arrays(path, self.arrays, [self.step, history, self.losses])


def load_state(path: Path) -> TrainingState | None:
    """Return None without a state; log a damaged one."""
    try:
        arrays, (step, told, losses) = load_arrays(path)
        history = [
            Evaluation(**{**each, "of_position": tuple(each["of_position"])}) for each in told
        ]
        return TrainingState(int(step), arrays, history, list(losses))
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _log.warning("training begins again: %s is damaged (%s)", path, error)
        return None


def train(
    lesson: Lesson, request: DistillRequest, progress: Progress
) -> tuple[Drafter, dict[str, Any]]:
    """Return the drafter and its report; resume the stored training if it is the same. Raises an
    EdgeSpecError, OSError."""
    if lesson.threads is not None:
        torch.set_num_threads(lesson.threads)
    output = StoredTables(lesson.weights).output_rows(lesson.token_ids)
    teacher = Teacher(lesson.weights.config, output, lesson.token_ids)
    trainee = make_trainee(teacher, lesson.weights, request)
    training = Training(trainee, teacher, lesson, request)
    training.run(progress)
    return trainee.drafter(), _report(training, lesson)


def _report(training: Training, lesson: Lesson) -> dict[str, Any]:
    """docs/cli.md lists the fields."""
    state = training.state
    best = state.best
    assert best is not None
    learnt, held_out = ([each.conversation for each in part] for part in lesson.divided)
    return {
        "acceptance": list(best.of_position),
        "forecast": {"num_draft_tokens": best.num_draft_tokens, "speedup": best.speedup},
        "pays": best.speedup > 1,
        "tokens": {"learnt": count_answered(learnt), "held_out": count_answered(held_out)},
        "vocabulary": {
            "scored": len(lesson.token_ids),
            "coverage": coverage(held_out, lesson.token_ids),
        },
        "costs_ms": {
            "passes": {rows: 1e3 * seconds for rows, seconds in lesson.passes_s.items()},
            "draft_token": 1e3 * training.draft_token_s,
        },
        # JSON has no NaN.
        "history": [
            asdict(each) | {"loss": None if math.isnan(each.loss) else each.loss}
            for each in state.history
        ],
        "machine": describe_machine(),
    }


def time_untrained(lesson: Lesson, trainee: Trainee, name: str) -> float:
    """Return the seconds per draft token before training, which does not change the arithmetic.
    name: of the directory, so that a later call finds it after a kill."""
    with scratch_beside(lesson.folder / "untrained") as work:
        path = work / name
        path.mkdir()
        trainee.drafter().write(path)
        return lesson.time_drafter(path)


class Training:
    """Trains on examples and evaluates on held-out ones."""

    def __init__(
        self,
        trainee: Trainee,
        teacher: Teacher,
        lesson: Lesson,
        request: DistillRequest,
    ) -> None:
        kind = KINDS[request.kind]
        num_rows = sum(len(each.features) for each in lesson.examples)
        self._rows = min(kind.rows, max(_LEAST_ROWS, num_rows // _LEAST_STEPS))
        self._epochs, self._rate, self._seed = (
            request.epochs or kind.epochs,
            kind.rate,
            request.seed,
        )
        self._lesson, self._trainee, self._teacher = lesson, trainee, teacher
        name = lesson.name or self._digest(lesson, request)
        self._path = lesson.folder / f"training-{name}.npz"
        self._parameters = list(trainee.parameters.values())
        self._optimizer: Any = torch.optim.AdamW(
            self._parameters, lr=self._rate, betas=_BETAS, fused=True
        )
        self.draft_token_s = time_untrained(lesson, trainee, self._path.stem)
        self.state = load_state(self._path) or TrainingState()
        self._restore()
        self._saved_s = time.monotonic()

    def run(self, progress: Progress) -> None:
        """Leave the best parameters in the trainee. An interrupt saves the steps so far. Raises
        StorageError, OSError."""
        state = self.state
        learnt, held_out = (windows_of(each, _WINDOW) for each in self._lesson.divided)
        shuffle = partial(shuffle_batches, learnt, self._rows, self._seed)
        an_epoch = len(shuffle(0))
        total = an_epoch * self._epochs
        every = max(1, total // _EVALUATIONS)
        batches: list[list[Window]] = []
        try:
            if not state.history:
                self._evaluate(held_out)
            while state.step < total and not self._has_converged():
                chances = "/".join(f"{100 * each:.0f}" for each in state.history[-1].of_position)
                progress(f"Training ({chances} % accepted by position)", state.step / total)
                epoch, at = divmod(state.step, an_epoch)
                if not batches or at == 0:
                    batches = shuffle(epoch)
                self._step(batches[at % len(batches)], total)
                if state.step % _STEPS_UNTIL_RETURNED == 0:
                    return_freed()
                if state.step % every == 0 or state.step == total:
                    self._evaluate(held_out)
                    self._save()
                elif time.monotonic() - self._saved_s > self._lesson.save_every_s:
                    self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        self._take(part_of(state.arrays, "best"))

    def _step(self, windows: Sequence[Window], total: int) -> None:
        state = self.state
        batch = batch_of(windows, self._trainee.num_positions)
        with fast_products():
            loss = loss_of(self._trainee, self._teacher, batch)
        self._optimizer.zero_grad()
        if loss.requires_grad:  # else the batch contains no scored token
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, _CLIP)
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * rate_at(state.step, total)
            self._optimizer.step()
        state.losses.append(float(loss.detach()))
        state.step += 1

    def _evaluate(self, windows: Sequence[Window]) -> None:
        state = self.state
        acceptance = held_out_acceptance(self._trainee, windows, self._rows)
        forecast = best_chain(acceptance, RowCosts(self._lesson.passes_s), self.draft_token_s)
        loss = float(np.mean(state.losses)) if state.losses else math.nan
        best = state.best
        if best is None or forecast.speedup > best.speedup:
            state.arrays |= named("best", as_arrays(self._trainee.parameters))
        state.history.append(Evaluation(state.step, loss, acceptance.of_position, *forecast))
        state.losses.clear()

    def _has_converged(self) -> bool:
        speedups = [each.speedup for each in self.state.history]
        return len(speedups) - 1 - int(np.argmax(speedups)) >= _PATIENCE

    def _save(self) -> None:
        arrays = self.state.arrays
        arrays |= named("parameters", as_arrays(self._trainee.parameters))
        for name, each in self._trainee.parameters.items():
            kept = self._optimizer.state.get(each, {})
            arrays |= named(f"optimizer/{name}", as_arrays(kept))
        self.state.save(self._path)
        self._saved_s = time.monotonic()

    def _restore(self) -> None:
        arrays = self.state.arrays
        self._take(part_of(arrays, "parameters"))
        for name, each in self._trainee.parameters.items():
            if kept := part_of(arrays, f"optimizer/{name}"):
                found = {key: torch.as_tensor(values.copy()) for key, values in kept.items()}
                self._optimizer.state[each] = found

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, values in arrays.items():
                self._trainee.parameters[name].copy_(torch.as_tensor(values))

    def _digest(self, lesson: Lesson, request: DistillRequest) -> str:
        """Return a digest of all that decides the training, which pass times do not."""
        decides = [request.kind, request.positions, self._seed]
        answered = [each.conversation.num_answered for each in lesson.examples]
        decides += [self._epochs, self._rows, *answered]
        content = hashlib.sha256(json.dumps(decides).encode() + lesson.token_ids.tobytes())
        return content.hexdigest()[:16]


def rate_at(step: int, total: int) -> float:
    """Return the share of the maximum rate: a linear rise, then a cosine."""
    warm = max(1, int(total * _WARM_UP))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def held_out_acceptance(trainee: Trainee, windows: Sequence[Window], rows: int) -> Acceptance:
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for each in in_batches(windows, rows):
        batch = batch_of(each, trainee.num_positions)
        with torch.no_grad(), fast_products():
            drafts = trainee.drafts(batch)
        ends = np.cumsum(batch.anchors.sum(axis=1))[:-1]  # of the windows
        of_windows = (np.split(values, ends) for values in (drafts, batch.written[batch.anchors]))
        found += zip(*of_windows, strict=True)
    return measure_acceptance(found)
