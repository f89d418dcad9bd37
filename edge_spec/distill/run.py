"""The whole of it: answers, features, training, proof, and the drafter in its place."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_spec.control.cost import RowCosts
from edge_spec.core.model import Progress, TensorRows
from edge_spec.diagnostics.lossless_check import Extent, Proof, prove
from edge_spec.distill.answers import write_answers
from edge_spec.distill.features import (
    Example,
    FeatureRequest,
    read_features,
    require_features,
)
from edge_spec.distill.kinds import KINDS
from edge_spec.distill.learning import Target, learn, write_drafter
from edge_spec.distill.prompts import (
    GivenPrompts,
    OwnPrompts,
    Tasks,
    domain_prompts,
    require_own_prompts,
)
from edge_spec.distill.report import document, html_page
from edge_spec.distill.request import DistillRequest
from edge_spec.distill.vocabulary import most_written
from edge_spec.engine.engine import Engine
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.loader import load_asked
from edge_spec.loader.head import open_weights
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source
from edge_spec.storage.atomic import (
    as_storage_error,
    atomic_directory,
    cache_directory,
    try_lock,
    unlock,
)
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

DIRECTORY = "distill"  # in the cache
_PROOF = Extent(num_prompts=8, max_tokens=48, num_draws=0, num_runs=2)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distilled:
    """The drafter at `path`, and what was measured: what `--json` prints."""

    path: Path
    report: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Material:
    """All that is learnt from, without the open model that it came from."""

    name: str
    target: Target
    examples: Sequence[Example]


def distill(
    model: str, asked: AskedOptions, request: DistillRequest, progress: Progress
) -> Distilled:
    """Trains a drafter for a model and writes it to `request.out`, once it has been shown to change
    no text. What is finished stays in the cache until then, where the same call goes on with it.

    asked: how the model is opened. Raises an EdgeSpecError, and KeyboardInterrupt after a word on
    how to go on.
    """
    if asked.draft or asked.drafter != "auto":
        raise UsageError("the drafter is what is trained", remedy="Leave --draft, --drafter out.")
    tasks = _tasks(request)
    source = Source(model, progress)
    weights = open_weights(source, "a trained drafter shares")
    with _folder(source, tasks) as folder, as_storage_error(folder / "answers.bin"):
        material = _material(model, asked, request, tasks, weights, folder, progress)
        learnt = learn(material.examples, material.target, request, folder, progress)
        with atomic_directory(request.out) as work:
            write_drafter(work, learnt.tensors, learnt.config)
            proof = _proven(model, asked, request, work, progress)
            report = document(request, material.name, learnt, proof)
            (work / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
            (work / "report.html").write_text(html_page(report), encoding="utf-8")
        _forget(folder)
    return Distilled(request.out, report)


def _tasks(request: DistillRequest) -> Tasks:
    """Raises UsageError for prompts or a domain that cannot be read, or have nothing in them."""
    if request.prompts is not None:
        prompts = [each.text for each in read_prompts(request.prompts)]
        return GivenPrompts(prompts, request.max_tokens)
    if request.domain is not None:
        return GivenPrompts(domain_prompts(request.domain), request.max_tokens)
    return OwnPrompts(request.max_tokens, request.seed)


@contextmanager
def _folder(source: Source, tasks: Tasks) -> Iterator[Path]:
    """Of this model and these prompts. Raises UsageError where another process is at it."""
    key = hashlib.sha256(f"{source.identity} {tasks.identity}".encode()).hexdigest()[:16]
    folder = cache_directory() / DIRECTORY / f"{source.name}-{key}"
    with as_storage_error(folder, refusals=True):
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(folder)
    if lock is None and os.name != "nt":
        raise UsageError(f"another process trains from {folder}", remedy="Wait until it has ended.")
    try:
        yield folder
    except KeyboardInterrupt:
        _log.warning("what is finished is kept in %s: the same command goes on with it", folder)
        raise
    finally:
        unlock(lock)


def _material(
    model: str,
    asked: AskedOptions,
    request: DistillRequest,
    tasks: Tasks,
    weights: TensorRows,
    folder: Path,
    progress: Progress,
) -> _Material:
    kind = KINDS[request.kind]
    with load_asked(model, asked, progress, keeps_ngrams=False) as engine:
        loaded = engine.parts.model
        layers = kind.layers(loaded.config)
        _require_trainable(engine, tasks)
        answers = write_answers(engine, tasks, folder, request.num_tokens, progress)
        wanted = FeatureRequest(layers, kind.of_answers, request.max_cache_bytes)
        examples = read_features(loaded, answers, wanted, folder, progress)
        learnt = [each for each in answers if not each.is_held_out]
        eos_ids = engine.parts.text.eos_ids
        ids = most_written(learnt, loaded.config.vocab_size, request.vocabulary, eos_ids)
        costs = engine.parts.speculation_factory.costs
        assert costs is not None  # the loader always gives them
        target = Target(loaded.config, weights, RowCosts(costs().measured), ids, asked.threads)
        return _Material(engine.name, target, examples)


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


def _proven(
    model: str, asked: AskedOptions, request: DistillRequest, drafter: Path, progress: Progress
) -> Proof:
    """Raises UnsupportedModelError for a drafter with which texts differ."""
    with_it = replace(asked, draft=[str(drafter)], drafter=KINDS[request.kind].drafter)
    with load_asked(model, with_it, progress, keeps_ngrams=False) as engine:
        proof = prove(engine, read_prompts(OWN_PROMPTS), _PROOF, progress)
    if proof.passed is False:
        raise UnsupportedModelError(
            f"texts with the drafter differ from those of {model}: it was not written",
            remedy="Run edge-spec verify on the model, and report what it finds.",
        )
    return proof


def _forget(folder: Path) -> None:
    """Keeps the answers alone, which a drafter of another kind can be trained on."""
    for path in folder.iterdir():
        if not path.name.startswith("answers"):
            with suppress(OSError):
                path.unlink()
