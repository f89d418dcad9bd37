"""From what was read of a target to a drafter that has learnt from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_spec.control.cost import RowCosts
from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress, TensorRows
from edge_spec.distill.acceptance import best_chain
from edge_spec.distill.draft_cost import draft_token_s
from edge_spec.distill.features import Example
from edge_spec.distill.kinds import KINDS, Kind
from edge_spec.distill.request import DistillRequest
from edge_spec.distill.tensor_file import write_tensors
from edge_spec.distill.training_state import Evaluation
from edge_spec.distill.vocabulary import coverage
from edge_spec.loader.head import StoredTables
from edge_spec.storage.atomic import scratch_directory

_LEAST_STEPS = 40  # of an epoch,
_LEAST_ROWS = 32  # but for steps of fewer rows

if TYPE_CHECKING:
    from edge_spec.distill.trainee import Trainee
    from edge_spec.distill.training import TrainingOptions


@dataclass(frozen=True, eq=False)
class Target:
    """What a drafter is trained for. costs: of its passes here. token_ids: those that are scored.
    threads: None: as PyTorch chooses."""

    config: ModelConfig
    weights: TensorRows
    costs: RowCosts
    token_ids: np.ndarray
    threads: int | None = None


@dataclass(frozen=True, eq=False)
class Learnt:
    """The drafter's file, and how it came to it. coverage: the share of held-out tokens that it
    scores. draft_s: of a draft token here."""

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]  # config.json
    history: Sequence[Evaluation]
    best: Evaluation
    coverage: float
    costs: RowCosts
    draft_s: float
    num_learnt: int  # tokens of answers,
    num_held_out: int


def learn(
    examples: Sequence[Example],
    target: Target,
    request: DistillRequest,
    folder: Path,
    progress: Progress,
) -> Learnt:
    """folder: keeps the training, which is gone on with where it is the same. Raises an
    EdgeSpecError, OSError."""
    import torch

    from edge_spec.distill.trainee import Teacher
    from edge_spec.distill.training import Training

    if target.threads is not None:
        torch.set_num_threads(target.threads)
    kind = KINDS[request.kind]
    output = StoredTables(target.weights).output_rows(target.token_ids)
    teacher = Teacher(target.config, output, target.token_ids)
    trainee = kind.make(teacher, target.weights, request)
    draft_s = _draft_s(trainee, target, folder)
    options = _options(kind, request, examples)
    path = folder / f"training-{_digest(options, request, target, examples)}.safetensors"
    training = Training(
        trainee,
        teacher,
        options,
        path,
        lambda found: best_chain(found, target.costs, lambda count: count * draft_s),
    )
    state = training.run(examples, progress)
    assert state.best is not None
    held_out = [each.conversation for each in examples if each.conversation.is_held_out]
    learnt = [each.conversation for each in examples if not each.conversation.is_held_out]
    return Learnt(
        tensors=trainee.stored(),
        config=trainee.description(),
        history=tuple(state.history),
        best=state.best,
        coverage=coverage(held_out, target.token_ids),
        costs=target.costs,
        draft_s=draft_s,
        num_learnt=sum(each.num_answered for each in learnt),
        num_held_out=sum(each.num_answered for each in held_out),
    )


def write_drafter(directory: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Raises StorageError where there is no space, OSError."""
    write_tensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _draft_s(trainee: Trainee, target: Target, folder: Path) -> float:
    """Times the drafter that has not learnt yet: the same arithmetic on other numbers."""
    with scratch_directory(folder / "untrained") as untrained:
        write_drafter(untrained, trainee.stored(), trainee.description())
        return draft_token_s(untrained, target.config, target.weights)


def _options(kind: Kind, request: DistillRequest, examples: Sequence[Example]) -> TrainingOptions:
    """Of little there are small steps: an epoch has a few of them at least."""
    from edge_spec.distill.training import TrainingOptions

    there = sum(len(each.features) for each in examples)
    rows = min(kind.rows, max(_LEAST_ROWS, there // _LEAST_STEPS))
    return TrainingOptions(
        epochs=request.epochs or kind.epochs, rate=kind.rate, rows=rows, seed=request.seed
    )


def _digest(
    options: TrainingOptions,
    request: DistillRequest,
    target: Target,
    examples: Sequence[Example],
) -> str:
    """Changes with all that decides the training, but for what passes cost."""
    told = [repr(options), request.kind, request.positions, len(examples)]
    told += [int(each.conversation.num_answered) for each in examples]
    content = json.dumps(told).encode() + target.token_ids.tobytes()
    return hashlib.sha256(content).hexdigest()[:16]
