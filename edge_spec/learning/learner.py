"""Keeps the answers of an engine beside it, has them learnt from while it is idle, and says which
head drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from edge_spec.core.isolated import IsolatedError, Lifeline, isolated
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.engine.learner_hooks import LearntHead
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.errors import EdgeSpecError, UnsupportedModelError, UsageError
from edge_spec.learning.conditions import Conditions
from edge_spec.learning.folder import ForgottenError, LearningFolder, folder_of
from edge_spec.learning.idle_learning import ASSIGNMENT, Assignment, learn_while_idle, next_task
from edge_spec.learning.texts import LearntText, as_kept
from edge_spec.learning.trial import Place, open_learnt_head
from edge_spec.loader.head import open_tables
from edge_spec.loader.open import OpenModels
from edge_spec.loader.place import PlacedModels
from edge_spec.models.asked_options import AskedOptions
from edge_spec.placement.idle_process import IdleProcess, is_idle
from edge_spec.placement.profile import stored_weights
from edge_spec.storage.json_store import DamagedError
from edge_spec.storage.locks import try_hold

QUIET_S = 8.0  # after an answer, before learning begins
_MOST_S = 3600.0  # of one process, after which it is taken to hang
_LEAST_TOKENS = 8  # of an answer that anything can be learnt from

_log = logging.getLogger(__name__)


def require_learnable(asked: AskedOptions) -> None:
    """Raises UsageError for drafters that what is learnt would not be one of."""
    if asked.draft not in (None, (), [], "none") or asked.drafter != "auto":
        raise UsageError(
            "--learn trains who drafts, and other drafters were asked for",
            remedy="Leave --draft and --drafter out, or --learn.",
        )


def start_learning(
    placed: PlacedModels,
    models: OpenModels,
    factory: SpeculationFactory,
    is_free: Callable[[], bool],
) -> Learner:
    """Raises UnsupportedModelError, UsageError for a model or a runtime that nothing can be learnt
    of, StorageError, OSError where nothing can be kept."""
    source, target = placed.source, placed.target
    _require_states(placed, models)
    open_tables(source, "a head that learns here shares")
    folder = folder_of(source.name, source.identity, stored_weights(target), target.runtime.name)

    def assignment() -> Assignment:
        place = Place(
            models.costs().measured,
            factory.lossless.widths,
            factory.branches,
            placed.options.draft_n_max,
        )
        return Assignment(source.model, place, tuple(target.text.eos_ids))

    def opens(path: Path) -> MedusaNetwork:
        return open_learnt_head(path, target.config, placed.options.threads)

    learner = Learner(folder, LearnerParts(source.name, assignment, opens, is_free))
    learner.start()
    return learner


def _require_states(placed: PlacedModels, models: OpenModels) -> None:
    name, runtime = placed.target.name, placed.target.runtime.name
    if models.target.config.encoder is not None:
        raise UnsupportedModelError(
            f"{name} has an encoder, and nothing is learnt for such a model",
            remedy="Leave --learn out.",
        )
    if not models.target.capabilities.hidden_states:
        raise UnsupportedModelError(
            f"--learn needs what the last layer of {name} computes, which {runtime} does not give",
            remedy="Use --runtime ort, llamacpp or reference, or leave --learn out.",
        )


@dataclass(frozen=True)
class LearnerParts:
    """model: its name. assignment: of the process that learns. opens: a head that was learnt.
    is_free: whether other idle work is done. is_idle: whether nobody else uses the machine."""

    model: str
    assignment: Callable[[], Assignment]
    opens: Callable[[Path], MedusaNetwork]
    is_free: Callable[[], bool] = lambda: True
    conditions: Conditions = field(default_factory=Conditions)
    is_idle: Callable[[], bool] = is_idle
    quiet_s: float = QUIET_S


class Learner:
    """Keeps answers and takes up heads; where another process learns from the same model's answers,
    this one only drafts with what is learnt."""

    def __init__(self, folder: LearningFolder, parts: LearnerParts) -> None:
        """Raises OSError, TimeoutError where nothing can be kept."""
        self._folder = folder
        self._parts = parts
        self._id = folder.open()
        self._lock = Lock()
        self._head: tuple[Path, LearntHead] | None = None
        self._release = try_hold(folder.lock)
        self._is_taking = self._release is not None
        self._writer = ThreadPoolExecutor(1, "edge-spec-learn")
        self._process = IdleProcess(
            self._learn, self._may_begin, quiet_s=parts.quiet_s, repeats=True
        )
        self._take_chosen()
        if self._release is None:
            _log.warning(
                "another process learns from %s: this one keeps no answers, and drafts with what "
                "was learnt",
                parts.model,
            )

    def start(self) -> None:
        if self._release is not None:
            self._process.start()

    def take(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        if not self._is_taking or len(tokens) < _LEAST_TOKENS:
            return
        self._writer.submit(self._write, LearntText(tuple(prompt), tokens, states))

    def head(self) -> LearntHead | None:
        with self._lock:
            if self._head is None:
                return None
            path, head = self._head
            if not path.is_dir():  # forgotten meanwhile
                self._head = None
                return None
            return head

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

    def _write(self, text: LearntText) -> None:
        """Keeps a text, but none that was forgotten while it was on its way."""
        try:
            with self._folder.writing(self._id):
                self._folder.texts.add(LearntText(text.prompt, text.tokens, as_kept(text.states)))
        except ForgottenError:
            self._id = self._folder.open()
        except (EdgeSpecError, OSError) as error:
            self._is_taking = False
            _log.warning("nothing more is learnt from answers of %s: %s", self._parts.model, error)

    def _may_begin(self) -> bool:
        if not self._is_taking or not self._parts.is_free():
            return False
        try:
            state = self._folder.state(self._parts.model)
        except (DamagedError, OSError):
            return self._parts.is_idle()  # the process begins again
        spent_s = state.spent_on(self._parts.conditions.today())
        is_begun = self._folder.training.exists()
        task = next_task(state, self._folder.texts.entries(), is_begun=is_begun)
        may = task is not None and self._parts.conditions.why_not(spent_s) is None
        return may and self._parts.is_idle()

    def _learn(self, lifeline: Lifeline) -> None:
        assignment = ASSIGNMENT.dump_json(self._parts.assignment()).decode()
        try:
            path = str(self._folder.path)
            isolated(learn_while_idle, path, assignment, timeout_s=_MOST_S, lifeline=lifeline)
        except IsolatedError as error:
            if not lifeline.has_ended:
                _log.warning(
                    "nothing more is learnt from answers of %s: %s", self._parts.model, error
                )
                self._is_taking = False
            raise
        finally:
            self._take_chosen()

    def _take_chosen(self) -> None:
        """Opens the head that drafts, where it is another one; a damaged one does not draft."""
        try:
            state = self._folder.state(self._parts.model)
            path = None if state.chosen is None else self._folder.head(state.chosen)
            with self._lock:
                if self._head is not None and path == self._head[0]:
                    return
            opened = (
                None if path is None else (path, LearntHead(self._parts.opens(path), state.stats))
            )
        except (DamagedError, EdgeSpecError, ValueError, OSError) as error:
            _log.warning("what was learnt for %s cannot be used: %s", self._parts.model, error)
            opened = None
        with self._lock:
            self._head = opened
