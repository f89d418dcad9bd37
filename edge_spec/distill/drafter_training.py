"""Makes a drafter of what was read of a target."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.core.model_info import TensorRows
from edge_spec.distill.answers import count_answered, coverage
from edge_spec.distill.features import Example
from edge_spec.distill.forecast import UNTRAINED, Acceptance, Forecast, best_chain
from edge_spec.distill.request import KINDS, DistillRequest, Kind
from edge_spec.loader.head import SAMPLE, StoredTables, target_sample
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.machine import describe_machine
from edge_spec.storage.atomic import as_storage_error, atomic_file, scratch_beside


@dataclass(frozen=True)
class Costs:
    """passes_s: of the target by rows, in seconds. draft_token_s: of a draft token."""

    passes_s: Mapping[int, float]
    draft_token_s: float


def kept_costs(path: Path, measure: Callable[[], Costs]) -> Costs:
    """Returns what the file holds; else what is measured now, and kept there. Raises OSError."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        told = json.loads(path.read_text(encoding="utf-8"))
        passes = {int(rows): float(seconds) for rows, seconds in told["passes_s"].items()}
        return Costs(passes, float(told["draft_token_s"]))
    found = measure()
    with atomic_file(path) as work:
        work.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return found


_TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}
_LARGEST = float(np.finfo(np.float16).max)
_LEAST_STEPS = 40  # of an epoch,
_LEAST_ROWS = 32  # but for steps of fewer rows

if TYPE_CHECKING:
    from edge_spec.distill.trainees import Trainee
    from edge_spec.distill.training import Evaluation, TrainingOptions


@dataclass(frozen=True)
class Keeping:
    """Says where an unfinished training is kept. name: of it; "": made of all that decides it.
    every_s: how often, beside each evaluation."""

    folder: Path
    name: str = ""
    every_s: float = math.inf


@dataclass(frozen=True, eq=False)
class Target:
    """Describes what a drafter is trained for. costs: of its passes here. token_ids: those that are
    scored. threads: None: as PyTorch chooses."""

    config: ModelConfig
    weights: TensorRows  # a Checkpoint for a kind that is made of layers
    costs: RowCosts
    token_ids: np.ndarray
    threads: int | None = None


@dataclass(frozen=True, eq=False)
class Drafter:
    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, Any]  # config.json
    texts: Mapping[str, str]  # other files

    def write(self, directory: Path) -> None:
        """Raises StorageError where there is no space, OSError."""
        _write_safetensors(directory / "model.safetensors", self.tensors)
        texts = {"config.json": json.dumps(self.config, indent=2), **self.texts}
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")


def learn(
    examples: Sequence[Example],
    target: Target,
    request: DistillRequest,
    keeping: Keeping,
    progress: Progress,
    token_s: Callable[[Path], float],
) -> tuple[Drafter, dict[str, Any]]:
    """Returns the drafter and what was measured of it. Goes on with the training that is kept,
    where it is the same. token_s: seconds of a draft token of the drafter in a directory. Raises an
    EdgeSpecError, OSError."""
    import torch

    from edge_spec.distill.trainees import Teacher, fastest_products, make_trainee
    from edge_spec.distill.training import Training

    if target.threads is not None:
        torch.set_num_threads(target.threads)
    kind = KINDS[request.kind]
    output = StoredTables(target.weights).output_rows(target.token_ids)
    teacher = Teacher(target.config, output, target.token_ids, fastest_products())
    trainee = make_trainee(teacher, target.weights, request)
    options = replace(_options(kind, request, examples), kept_every_s=keeping.every_s)
    folder, digest = keeping.folder, keeping.name or _digest(options, request, target, examples)
    # Measured once: a training that is gone on with judges by the same costs.
    costs = kept_costs(
        folder / f"costs-{digest}.json",
        lambda: Costs(target.costs.measured, _untrained_token_s(trainee, folder, digest, token_s)),
    )
    passes, draft_s = RowCosts(costs.passes_s), costs.draft_token_s

    def judge(found: Acceptance) -> Forecast:
        return best_chain(found, passes, lambda count: count * draft_s)

    training = Training(trainee, teacher, options, folder / f"training-{digest}.npz", judge)
    history = training.run(examples, progress).history
    drafter = _drafter(trainee)
    if not kind.scores_all:  # a head says what tells its target from others of the same shape
        sample = {SAMPLE: target_sample(target.weights)}
        drafter = replace(drafter, config={**drafter.config, **sample})
    return drafter, _report(history, costs, examples, target, kind)


def _report(
    history: Sequence[Evaluation],
    costs: Costs,
    examples: Sequence[Example],
    target: Target,
    kind: Kind,
) -> dict[str, Any]:
    """docs/distill.md lists the fields."""
    best = max(history, key=lambda each: each.speedup)
    held_out = [each.conversation for each in examples if each.conversation.is_held_out]
    learnt = [each.conversation for each in examples if not each.conversation.is_held_out]
    return {
        "acceptance": list(best.of_position),
        "forecast": {"num_draft_tokens": best.num_draft_tokens, "speedup": best.speedup},
        "pays": best.speedup > 1,
        "tokens": {"learnt": count_answered(learnt), "held_out": count_answered(held_out)},
        "vocabulary": {
            "scored": target.config.vocab_size if kind.scores_all else len(target.token_ids),
            "coverage": 1.0 if kind.scores_all else coverage(held_out, target.token_ids),
        },
        "costs_ms": {
            "passes": {rows: 1e3 * seconds for rows, seconds in costs.passes_s.items()},
            "draft_token": 1e3 * costs.draft_token_s,
        },
        # JSON has no number for what was not measured.
        "history": [
            asdict(each) | {"loss": None if math.isnan(each.loss) else each.loss}
            for each in history
        ],
        "machine": describe_machine(),
    }


def _drafter(trainee: Trainee) -> Drafter:
    tensors = {name: _halved(values) for name, values in trainee.stored().items()}
    return Drafter(tensors, trainee.description(), trainee.texts())


def _halved(values: np.ndarray) -> np.ndarray:
    """Returns float32 as float16, unless something is too large for that."""
    is_fitting = values.dtype == np.float32 and np.abs(values).max(initial=0) < _LARGEST
    return values.astype(np.float16) if is_fitting else values


def _untrained_token_s(
    trainee: Trainee, folder: Path, digest: str, measure: Callable[[Path], float]
) -> float:
    """Times the drafter that has not learnt yet: the same arithmetic on other numbers."""
    with scratch_beside(folder / "untrained") as scratch:
        path = scratch / f"{UNTRAINED}-{digest}"
        path.mkdir()
        _drafter(trainee).write(path)
        return measure(path)


def _options(kind: Kind, request: DistillRequest, examples: Sequence[Example]) -> TrainingOptions:
    """Returns small steps where there is little: an epoch has a few of them at least."""
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
    told = [repr(options), request.kind, request.positions, request.layers, len(examples)]
    told += [int(each.conversation.num_answered) for each in examples]
    content = json.dumps(told).encode() + target.token_ids.tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises StorageError where there is no space, OSError."""
    header, end = {}, 0
    for name, each in tensors.items():
        begin, end = end, end + each.nbytes
        kind = _TYPES[each.dtype.name]
        header[name] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for each in tensors.values():
            file.write(each.astype(each.dtype.newbyteorder("<")).tobytes())
