"""Run `edge-spec distill`: answers, features, training, proof."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.core.model import Progress
from edge_spec.core.model_info import TensorRows
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.diagnostics.lossless_check.prove import prove
from edge_spec.distill.answers import ANSWERS_FILE, choose_scored, write_answers
from edge_spec.distill.cluster import Cluster, Machine, ThisMachine, require_answer
from edge_spec.distill.features import FeatureRequest, read_features, require_features
from edge_spec.distill.forecast import time_head
from edge_spec.distill.prompts import (
    GivenPrompts,
    OwnPrompts,
    PackagedTasks,
    Tasks,
    require_own_prompts,
)
from edge_spec.distill.request import KINDS, DistillRequest
from edge_spec.engine.engine import Engine
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.loader import load_asked
from edge_spec.loader.head import open_tables, open_weights
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.draft_choice import place_of
from edge_spec.models.source import Source
from edge_spec.scheduler.measure import median_seconds, quick_passes
from edge_spec.storage.atomic import as_storage_error, atomic_directory, cache_directory, try_hold
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

if TYPE_CHECKING:
    from edge_spec.distill.training import Lesson

KEPT_DAYS = 7  # for unfinished work
DIRECTORY = "distill"  # in the cache
_log = logging.getLogger(__name__)


@contextmanager
def work_folder(source: Source, tasks: str) -> Iterator[Path]:
    """Yield the folder of a model's tasks, which a later training resumes; a log line says so after
    an interrupt or on a full disk. Remove it if empty, and others unused for KEPT_DAYS. Raises
    UsageError if another process uses it."""
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
        if (folder / ANSWERS_FILE).exists():
            _log.warning(
                "what is finished is kept in %s for %d days: the same command goes on with it",
                folder,
                KEPT_DAYS,
            )
        raise
    finally:
        with suppress(OSError):
            folder.rmdir()  # if nothing was begun
        release()


def forget_training(folder: Path) -> None:
    """Remove all but the answers, which other kinds of drafters can learn from."""
    for path in folder.iterdir():
        if path.name != ANSWERS_FILE:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_old(parent: Path) -> None:
    for folder in parent.iterdir():
        with suppress(OSError):  # another process may be removing it
            is_old = time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400
            release = try_hold(folder) if is_old and folder.is_dir() else None
            if release is not None:
                shutil.rmtree(folder, ignore_errors=True)
                release()


_OF_CODE = "code"  # in names of code models: Qwen2.5-Coder, StarCoder, Codestral
_PROOF = Extent(count=8, max_tokens=48, draws=0)


@dataclass(frozen=True)
class Distilled:
    """The drafter at `path`, and the report that `--json` prints."""

    path: Path
    report: dict[str, Any]


def distill(
    model: str, asked: AskedOptions, request: DistillRequest, progress: Progress
) -> Distilled:
    """Train a drafter, prove that it changes no text, and write it to `request.out`, or where the
    model finds it.

    Until then the cache holds finished work, which the same call resumes. asked: how the model is
    opened. Raises an EdgeSpecError, KeyboardInterrupt.
    """
    if asked.draft or asked.drafter != "auto":
        raise UsageError("the drafter is what is trained", remedy="Leave --draft, --drafter out.")
    asked = replace(asked, draft=["none"])  # no earlier drafter may draft
    source, kind = Source(model, progress), KINDS[request.kind]
    tasks = _choose_tasks(request, source)
    if request.ray is not None:
        require_answer(request.ray)
    out = request.out or place_of(source, request.kind)
    weights = _open_weights(source, request.kind)
    kind.layers(weights.config)  # raises before any work begins
    from edge_spec.distill.trainees import training_device  # lazy: imports PyTorch
    from edge_spec.distill.training import train

    with work_folder(source, tasks.identity) as folder, as_storage_error(folder / ANSWERS_FILE):
        name, lesson = _prepare(model, asked, request, tasks, weights, folder, progress)
        with training_device():
            drafter, report = train(lesson, request, progress)
        with atomic_directory(out) as made:
            drafter.write(made)
            with_it = replace(asked, draft=[str(made)], drafter=kind.drafter)
            with load_asked(model, with_it, progress, keeps_answers=False) as engine:
                proof = prove(engine, read_prompts(OWN_PROMPTS), _PROOF, progress)
            if proof.passed is False:
                forget_training(folder)  # a rerun would give the same result
                raise UnsupportedModelError(
                    f"texts with the drafter differ from those of {model}: it was not written",
                    remedy="Run edge-spec verify on the model, and report what it finds.",
                )
            report = {"model": name, "kind": request.kind, **report}
            report["verify"] = {
                "passed": proof.passed,
                "promise": str(proof.lossless.promise),
                "num_tokens": proof.greedy.num_tokens,
                "draft_tokens": proof.greedy.num_guesses,
                "draft_tokens_accepted": proof.greedy.num_accepted,
            }
            (made / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        forget_training(folder)
    return Distilled(out, report)


def _prepare(
    model: str,
    asked: AskedOptions,
    request: DistillRequest,
    tasks: Tasks,
    weights: TensorRows,
    folder: Path,
    progress: Progress,
) -> tuple[str, Lesson]:
    """Return the model's name and the lesson. folder: stores finished work."""
    from edge_spec.distill.training import Lesson

    config, kind = weights.config, KINDS[request.kind]
    features = FeatureRequest(kind.layers(config), kind.of_answers)
    with load_asked(model, asked, progress, keeps_answers=False) as engine:
        _require_trainable(engine, tasks)
        machines: AbstractContextManager[Machine] = nullcontext(ThisMachine(engine, tasks))
        if request.ray is not None:
            machines = Cluster(request.ray, model, asked, tasks)
        with machines as machine:
            answers = write_answers(machine, tasks, folder, request.num_tokens, progress)
        examples = read_features(engine.parts.model, answers, features, folder, progress)
        learnt = [each for each in answers if not each.is_held_out]
        ids = choose_scored(learnt, config, request.vocabulary, engine.parts.text.eos_ids)
        # Not from the model's profile, which may have been measured on a busy machine.
        passes_s = median_seconds(quick_passes(engine.parts.model))
        timed = partial(time_head, source=weights)
        lesson = Lesson(examples, weights, ids, passes_s, timed, folder, asked.threads)
        return engine.name, lesson


def _choose_tasks(request: DistillRequest, source: Source) -> Tasks:
    """Raises UsageError for unreadable or too few prompts."""
    if request.prompts is not None:
        prompts = [each.text for each in read_prompts(request.prompts)]
        return GivenPrompts(prompts, request.max_tokens)
    if _OF_CODE in source.name.lower():
        return PackagedTasks(request.max_tokens, request.seed)
    return OwnPrompts(request.max_tokens, request.seed)


def _open_weights(source: Source, kind: str) -> TensorRows:
    """Raises UsageError without tables to share, UnsupportedModelError if the drafter would start
    as a layer that only llama.cpp can read."""
    tables = open_tables(source, "a trained drafter shares")
    if KINDS[kind].of_answers:
        return tables
    try:
        return open_weights(source, "a trained drafter shares")
    except UsageError:
        raise UnsupportedModelError(
            f"a drafter of the kind {kind} begins as a layer of its target, and those of "
            f"{source.model} are read by llama.cpp alone",
            remedy="Use --kind medusa.",
        ) from None


def _require_trainable(engine: Engine, tasks: Tasks) -> None:
    if engine.parts.model.config.encoder is not None:
        raise UnsupportedModelError(
            f"{engine.name} has an encoder, and no drafter is trained for such a model",
            remedy="Use another target.",
        )
    require_features(engine.parts.model, engine.name)
    if isinstance(tasks, OwnPrompts):
        require_own_prompts(engine)
