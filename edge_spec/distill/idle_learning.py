"""`--learn`: trains a head on the answers of an engine while nobody is answered.

The engine keeps its answers with the states that chose them (`LearntFolder`). A process of its own
trains Medusa heads on them, as `edge-spec distill` does, and is killed when an answer begins. The
head drafts if it is forecast to pay on held-out answers.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.control.cost import RowCosts
from edge_spec.core.isolated import IsolatedError, Lifeline, isolated
from edge_spec.core.model import Progress
from edge_spec.distill.conversations import filled_up, most_written
from edge_spec.distill.draft_runs import draft_token_s
from edge_spec.distill.drafter_training import Keeping, Target, learn
from edge_spec.distill.learnt_folder import HeadReport, LearntFolder, folder_of, open_folder
from edge_spec.distill.request import DistillRequest, default_scored, require_torch
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.errors import EdgeSpecError, UnsupportedModelError, UsageError
from edge_spec.loader.head import open_tables, open_trained_head
from edge_spec.loader.open import OpenModels
from edge_spec.loader.place import PlacedModels
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source
from edge_spec.placement.idle_process import LOWEST, IdleProcess, give_way, is_idle
from edge_spec.placement.machine import on_battery
from edge_spec.placement.profile import stored_weights
from edge_spec.storage.atomic import atomic_directory, try_hold

QUIET_S = 8.0  # after an answer, before learning begins
MOST_S_A_DAY = 1800.0  # of one core, of one engine: at 10 W, 5 Wh
_MOST_S = 2 * MOST_S_A_DAY  # of one process, after which it is taken to hang
_KEPT_EVERY_S = 10.0
_EPOCHS, _LEAST_STEPS = 8, 300  # a step reads an answer at least
_LOOKED_EVERY_S = 2.0
_MOST_MILLICELSIUS = 75_000
_LEAST_TOKENS = 8  # of an answer that anything can be learnt from
_SHARES = "a head that learns here shares"
_log = logging.getLogger(__name__)


def require_learnable(asked: AskedOptions) -> None:
    """Raises UsageError for drafters that what is learnt would not be one of,
    MissingDependencyError without PyTorch."""
    if asked.draft not in (None, (), [], "none") or asked.drafter != "auto":
        raise UsageError(
            "--learn trains who drafts, and other drafters were asked for",
            remedy="Leave --draft and --drafter out, or --learn.",
        )
    require_torch()


def start_learning(
    placed: PlacedModels,
    models: OpenModels,
    factory: SpeculationFactory,
    is_free: Callable[[], bool],
) -> Learner:
    """Raises UnsupportedModelError, UsageError for a model or a runtime that nothing can be learnt
    of, StorageError where nothing can be kept."""
    target, name, runtime = models.target, placed.target.name, placed.target.runtime.name
    if target.config.encoder is not None:
        raise UnsupportedModelError(
            f"{name} has an encoder, and nothing is learnt for such a model",
            remedy="Leave --learn out.",
        )
    if not target.capabilities.hidden_states:
        raise UnsupportedModelError(
            f"--learn needs what the last layer of {name} computes, which {runtime} does not give",
            remedy="Use --runtime ort, llamacpp or reference, or leave --learn out.",
        )
    open_tables(placed.source, _SHARES)
    learner = Learner(placed, models, is_free)
    learner.start()
    return learner


class Learner:
    """Keeps answers and takes up heads; where another process learns from the same model's answers,
    this one only drafts with what is learnt."""

    def __init__(
        self, placed: PlacedModels, models: OpenModels, is_free: Callable[[], bool]
    ) -> None:
        """is_free: whether other idle work is done. Raises StorageError where nothing can be
        kept."""
        source, target = placed.source, placed.target
        self._placed, self._models, self._is_free = placed, models, is_free
        self._name = source.name
        weights, runtime = stored_weights(target), target.runtime.name
        self._path = folder_of(source.name, source.identity, weights, runtime)
        self._release = try_hold(self._path)
        self._folder = open_folder(self._path)
        self._report: HeadReport | None = None
        self._head: MedusaNetwork | None = None
        self._is_taking = self._release is not None
        self._spent = ("", 0.0)  # a day, and seconds of learning on it
        self._writer = ThreadPoolExecutor(1, "edge-spec-learn")
        self._process = IdleProcess(self._learn, self._may_begin, quiet_s=QUIET_S, repeats=True)
        self._take_head()
        if self._release is None:
            _log.warning(
                "another process learns from %s: this one keeps no answers, and drafts with what "
                "was learnt",
                self._name,
            )

    def start(self) -> None:
        if self._release is not None:
            self._process.start()

    def take(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        if self._is_taking and len(tokens) >= _LEAST_TOKENS:
            self._writer.submit(self._write, prompt, tokens, states)

    def head(self) -> MedusaNetwork | None:
        return None if self._folder.is_forgotten else self._head

    def pause(self) -> None:
        self._process.pause()

    def resume(self) -> None:
        self._process.resume()

    def close(self) -> None:
        self._process.close()
        self._writer.shutdown()
        if self._release is not None:
            self._release()
            self._release = None

    def _write(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        """Keeps an answer, but none that was forgotten while it was on its way."""
        try:
            if self._folder.is_forgotten:
                self._report, self._head = None, None
                self._folder = open_folder(self._path)
            else:
                self._folder.add(prompt, tokens, states)
        except FileNotFoundError:
            return
        except (EdgeSpecError, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_taking = False
        _log.warning("nothing more is learnt from answers of %s: %s", self._name, error)

    def _spent_s(self) -> float:
        """Returns the seconds of learning today."""
        day, spent_s = self._spent
        return spent_s if day == _today() else 0.0

    def _may_begin(self) -> bool:
        may = self._is_taking and self._is_free() and self._spent_s() < MOST_S_A_DAY
        return may and self._folder.has_work() and not _is_hot() and is_idle()

    def _learn(self, lifeline: Lifeline) -> None:
        began_s, spent_s = time.monotonic(), self._spent_s()
        told = {
            "folder": str(self._folder.path),
            "model": self._placed.source.model,
            "passes_s": dict(self._models.costs().measured),
            "eos_ids": list(self._placed.target.text.eos_ids),
            "most_s": MOST_S_A_DAY - spent_s,
        }
        try:
            isolated(learn_while_idle, json.dumps(told), timeout_s=_MOST_S, lifeline=lifeline)
        except IsolatedError as error:
            if not lifeline.has_ended:
                self._give_up(error)
            raise
        finally:
            self._spent = (_today(), spent_s + time.monotonic() - began_s)
            self._take_head()

    def _take_head(self) -> None:
        """Opens the head that pays, where it is another one; a damaged one does not draft."""
        report = self._folder.report()
        if report == self._report:
            return
        self._report, self._head = report, None
        placed, path = self._placed, self._folder.head
        try:
            if report is not None and report.pays:
                threads = placed.options.threads
                head = open_trained_head(path, placed.source, placed.target, threads, keeps=False)
                assert isinstance(head, MedusaNetwork)
                self._head = head
        except (EdgeSpecError, ValueError, OSError) as error:
            _log.warning("what was learnt for %s cannot be used: %s", self._name, error)


def learn_while_idle(assignment: str) -> None:
    """Trains a head in the other process, on one core and with the lowest priority, and writes it.
    Raises an EdgeSpecError, OSError."""
    give_way(LOWEST)
    told = json.loads(assignment)
    folder = LearntFolder(Path(told["folder"]))
    try:
        train_head(folder, told, _Watch(folder, told["most_s"]))
    except KeyboardInterrupt:
        pass  # the machine is needed: what was learnt is kept
    except OSError:
        if not folder.is_forgotten:
            raise
    finally:
        if folder.is_forgotten:
            shutil.rmtree(folder.path, ignore_errors=True)  # what was written meanwhile


def train_head(folder: LearntFolder, told: dict[str, Any], progress: Progress) -> None:
    """told: `model`, whose output matrix the head shares, `passes_s`, the times of its passes by
    rows, and `eos_ids`. Raises an EdgeSpecError, OSError, and what `progress` raises."""
    weights = open_tables(Source(told["model"], lambda what, fraction: None), _SHARES)
    config = weights.config
    answers = folder.answers()
    until = folder.unfinished()
    until = answers[-1].number + 1 if until is None else until
    examples = list(folder.examples([each for each in answers if each.number < until], config))
    if {each.conversation.is_held_out for each in examples} != {True, False}:
        shutil.rmtree(folder.training, ignore_errors=True)  # of answers that are gone
        return
    learnt = [each.conversation for each in examples if not each.conversation.is_held_out]
    request = DistillRequest(kind="medusa", epochs=max(_EPOCHS, _LEAST_STEPS // len(learnt)))
    count = default_scored(config)
    ids = most_written(learnt, config.vocab_size, count, told["eos_ids"])
    ids = filled_up(ids, config.vocab_size, count)
    passes_s = {int(rows): seconds for rows, seconds in told["passes_s"].items()}
    target = Target(config, weights, RowCosts(passes_s), ids, threads=1)
    token_s = partial(draft_token_s, target=config, source=weights)
    # By its number alone: an answer that was removed meanwhile does not begin it anew.
    keeping = Keeping(folder.training, f"{until:08}", _KEPT_EVERY_S)
    drafter, report = learn(examples, target, request, keeping, progress, token_s)
    with atomic_directory(folder.head) as work:
        drafter.write(work)
        (work / "report.json").write_text(json.dumps(report | {"until": until}), encoding="utf-8")
    shutil.rmtree(folder.training, ignore_errors=True)


class _Watch:
    """Ends a training once the machine is needed, by the interrupt that keeps its steps, and one of
    answers that were forgotten. most_s: of a processor."""

    def __init__(self, folder: LearntFolder, most_s: float) -> None:
        self._folder, self._most_s = folder, most_s
        self._looked_s = time.monotonic()

    def __call__(self, what: str, fraction: float) -> None:
        if self._folder.is_forgotten:
            raise FileNotFoundError(self._folder.path)
        if time.monotonic() - self._looked_s < _LOOKED_EVERY_S:
            return
        self._looked_s = time.monotonic()
        if time.process_time() > self._most_s or on_battery() or _is_hot():
            raise KeyboardInterrupt


def _is_hot() -> bool:
    """Says whether a sensor of this machine is hot, where the system knows (Linux)."""
    for sensor in Path("/sys/class/thermal").glob("thermal_zone*/temp"):
        with suppress(OSError, ValueError):  # it may say nothing
            if int(sensor.read_text(encoding="ascii")) >= _MOST_MILLICELSIUS:
                return True
    return False


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")
