"""The whole of it: answers, features, training, proof, and the drafter in its place."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.core.model_info import TensorRows
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.diagnostics.lossless_check.prove import Proof, prove
from edge_spec.distill.answers import (
    ANSWERS_FILE,
    KEPT_DAYS,
    Writers,
    filled_up,
    local_writers,
    most_written,
    with_others,
    write_answers,
)
from edge_spec.distill.cluster import Cluster, require_answer
from edge_spec.distill.drafter_training import Keeping, Target, learn
from edge_spec.distill.features import (
    Example,
    FeatureRequest,
    Reader,
    feature_rows,
    read_features,
    require_features,
)
from edge_spec.distill.forecast import converted_aside, draft_token_s, ordinary_draft_token_s
from edge_spec.distill.prompts import (
    Conversation,
    GivenPrompts,
    OwnPrompts,
    PackagedTasks,
    Tasks,
    require_own_prompts,
)
from edge_spec.distill.request import KINDS, DistillRequest, default_scored
from edge_spec.engine.engine import Engine
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.loader import load_asked
from edge_spec.loader.head import open_tables, open_weights
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.draft_choice import place_of
from edge_spec.models.source import Source
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.measure import median_seconds, quick_passes
from edge_spec.storage.atomic import as_storage_error, atomic_directory, cache_directory, try_hold
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

DIRECTORY = "distill"  # in the cache
_log = logging.getLogger(__name__)


@contextmanager
def work_folder(source: Source, tasks: str) -> Iterator[Path]:
    """Yields the folder of this model and these tasks, by their identity: whoever trains for both
    goes on with it.

    After an interrupt, or a disk that is full, a line says where it is. Folders that nobody has
    used for KEPT_DAYS are removed, and so is one in which nothing was finished. Raises UsageError
    where another process is at it.
    """
    parent = cache_directory() / DIRECTORY
    key = hashlib.sha256(f"{source.identity} {tasks}".encode()).hexdigest()[:16]
    folder = parent / f"{source.name}-{key}"
    release = try_hold(folder)
    if release is None:
        raise UsageError(f"another process trains from {folder}", remedy="Wait until it has ended.")
    try:
        with as_storage_error(folder, refusals=True):
            folder.mkdir(exist_ok=True)
            os.utime(folder)
        _remove_old(parent)
        yield folder
    except (KeyboardInterrupt, OSError):
        if _has_answers(folder):
            _log.warning(
                "what is finished is kept in %s for %d days: the same command goes on with it",
                folder,
                KEPT_DAYS,
            )
        raise
    finally:
        if not _has_answers(folder):
            shutil.rmtree(folder, ignore_errors=True)
        release()


def forget_training(folder: Path) -> None:
    """Keeps the answers alone, which a drafter of another kind can be trained on."""
    for path in folder.iterdir():
        if path.name != ANSWERS_FILE:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _has_answers(folder: Path) -> bool:
    with suppress(OSError):
        return (folder / ANSWERS_FILE).stat().st_size > 0
    return False


def _remove_old(parent: Path) -> None:
    """Leaves those alone that a process works in."""
    for folder in parent.iterdir():
        with suppress(OSError):  # another process may be removing it
            is_old = time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400
            release = try_hold(folder) if is_old and folder.is_dir() else None
            if release is not None:
                shutil.rmtree(folder, ignore_errors=True)
                release()


_BYTES_OF_MB = 1_000_000
_OF_CODE = "code"  # in the names of models that program: Qwen2.5-Coder, StarCoder, Codestral
_PROOF = Extent(count=8, max_tokens=48, draws=0, runs=2)


@dataclass(frozen=True)
class Distilled:
    """The drafter at `path`, and what was measured: what `--json` prints."""

    path: Path
    report: dict[str, Any]


def distill(
    model: str, asked: AskedOptions, request: DistillRequest, progress: Progress
) -> Distilled:
    """Trains a drafter for a model and writes it to `request.out`, or where the model finds it by
    itself, once it has been shown to change no text. What is finished stays in the cache until
    then, where the same call goes on with it.

    asked: how the model is opened. Raises an EdgeSpecError, and KeyboardInterrupt after a word on
    how to go on.
    """
    if asked.draft or asked.drafter != "auto":
        raise UsageError("the drafter is what is trained", remedy="Leave --draft, --drafter out.")
    asked = replace(asked, draft=["none"])  # one that was trained before drafts by itself
    source = Source(model, progress)
    tasks = _tasks(request, source)
    if request.ray is not None:
        require_answer(request.ray)
    out = request.out or place_of(source, request.kind)
    weights = _weights(source, request.kind)
    KINDS[request.kind].require(weights.config, request)
    from edge_spec.distill.trainees import training_device  # it imports PyTorch

    with (
        work_folder(source, tasks.identity) as folder,
        as_storage_error(folder / ANSWERS_FILE),
    ):
        work = _Work(model, asked, request, tasks, folder, progress)
        name, target, examples = work.material(weights)
        token_s = work.token_s(target)
        with training_device():
            drafter, report = learn(examples, target, request, Keeping(folder), progress, token_s)
        with atomic_directory(out) as made:
            drafter.write(made)
            report = {"model": name, "kind": request.kind, **report}
            report["verify"] = _verified(work.proof(made))
            (made / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        forget_training(folder)
    return Distilled(out, report)


def _weights(source: Source, kind: str) -> TensorRows:
    """Raises UsageError for a target without the tables that a drafter shares,
    UnsupportedModelError where the drafter is made of layers that only a library reads."""
    tables = open_tables(source, "a trained drafter shares")
    if not KINDS[kind].of_layers:
        return tables
    try:
        return open_weights(source, "a trained drafter shares")
    except UsageError:
        raise UnsupportedModelError(
            f"a drafter of the kind {kind} begins as layers of its target, and those of "
            f"{source.model} are read by llama.cpp alone",
            remedy="Use --kind medusa.",
        ) from None


def _tasks(request: DistillRequest, source: Source) -> Tasks:
    """Raises UsageError for prompts that cannot be read, or of which there are too few."""
    if request.prompts is not None:
        prompts = [each.text for each in read_prompts(request.prompts)]
        return GivenPrompts(prompts, request.max_tokens)
    if _OF_CODE in source.name.lower():
        return PackagedTasks(request.max_tokens, request.seed)
    return OwnPrompts(request.max_tokens, request.seed)


@dataclass(frozen=True, eq=False)
class _Work:
    """Does what needs the open model. folder: keeps what is finished."""

    model: str
    asked: AskedOptions
    request: DistillRequest
    tasks: Tasks
    folder: Path
    progress: Progress

    def material(self, weights: TensorRows) -> tuple[str, Target, Sequence[Example]]:
        """The model's name, and all that is learnt from, without the open model."""
        request = self.request
        with self._opened() as engine:
            _require_trainable(engine, self.tasks)
            with self._sources(engine) as (writers, reader):
                answers = write_answers(
                    writers, self.tasks, self.folder, request.num_tokens, self.progress
                )
                examples = read_features(
                    engine.parts.model,
                    answers,
                    self._wanted(weights),
                    self.folder,
                    self.progress,
                    reader,
                )
            learnt = [each for each in answers if not each.is_held_out]
            ids = self._scored(learnt, weights.config, engine.parts.text.eos_ids)
            # What is kept of them may be of a day on which the machine was busy.
            measured = RowCosts(median_seconds(quick_passes(engine.parts.model)))
            target = Target(weights.config, weights, measured, ids, self.asked.threads)
            return engine.name, target, examples

    def _scored(
        self, learnt: Sequence[Conversation], config: ModelConfig, eos_ids: Sequence[int]
    ) -> np.ndarray:
        count = self.request.vocabulary or default_scored(config)
        ids = most_written(learnt, config.vocab_size, count, eos_ids)
        if KINDS[self.request.kind].scores_all:
            return with_others(ids, config.vocab_size, count // 2, self.request.seed)
        return filled_up(ids, config.vocab_size, count)

    def token_s(self, target: Target) -> Callable[[Path], float]:
        if KINDS[self.request.kind].scores_all:
            return partial(ordinary_draft_token_s, asked=self.asked, progress=self.progress)
        return partial(draft_token_s, target=target.config, source=target.weights)

    def proof(self, drafter: Path) -> Proof:
        """Raises UnsupportedModelError for a drafter with which texts differ."""
        name = KINDS[self.request.kind].drafter
        with_it = replace(self.asked, draft=[str(drafter)], drafter=name)
        with (
            converted_aside(drafter),
            load_asked(self.model, with_it, self.progress, keeps_answers=False) as engine,
        ):
            proof = prove(engine, read_prompts(OWN_PROMPTS), _PROOF, self.progress)
        if proof.passed is False:
            forget_training(self.folder)  # the same would come of it again
            raise UnsupportedModelError(
                f"texts with the drafter differ from those of {self.model}: it was not written",
                remedy="Run edge-spec verify on the model, and report what it finds.",
            )
        return proof

    def _wanted(self, weights: TensorRows) -> FeatureRequest:
        kind = KINDS[self.request.kind]
        layers = kind.layers(weights.config)
        return FeatureRequest(layers, kind.of_answers, self.request.max_cache_mb * _BYTES_OF_MB)

    def _opened(self) -> Engine:
        return load_asked(self.model, self.asked, self.progress, keeps_answers=False)

    @contextmanager
    def _sources(self, engine: Engine) -> Iterator[tuple[Writers, Reader]]:
        """Yields who answers, and who reads what the model computes: this machine, or those of
        --ray."""
        if self.request.ray is None:
            writers = partial(local_writers, engine, self.tasks)
            yield writers, partial(feature_rows, engine.parts.model)
            return
        with Cluster(self.request.ray, self.model, self.asked, self.tasks) as cluster:
            yield cluster.writers, cluster.feature_rows


def _verified(proof: Proof) -> dict[str, Any]:
    return {
        "passed": proof.passed,
        "promise": str(proof.lossless.promise),
        "num_tokens": proof.greedy.num_tokens,
        "draft_tokens": proof.greedy.num_guesses,
        "draft_tokens_accepted": proof.greedy.num_accepted,
    }


def _require_trainable(engine: Engine, tasks: Tasks) -> None:
    """Raises UnsupportedModelError, UsageError."""
    if engine.parts.model.config.encoder is not None:
        raise UnsupportedModelError(
            f"{engine.name} has an encoder, and no drafter is trained for such a model",
            remedy="Use another target.",
        )
    require_features(engine.parts.model, engine.name)
    if isinstance(tasks, OwnPrompts):
        require_own_prompts(engine)
