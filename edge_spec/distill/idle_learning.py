"""`--learn`: train a head on an engine's answers while it is idle.

The engine stores its answers with the hidden states that chose their tokens. A separate process
trains Medusa heads on them as `edge-spec distill` does; it is killed when an answer begins. A head
drafts if it is forecast to pay on held-out answers. A model's folder in the cache,
`learnt/NAME-DIGEST`, is readable by its user only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.distill.answers import choose_scored
from edge_spec.distill.features import Example, load_arrays, save_arrays, to_half
from edge_spec.distill.forecast import time_head
from edge_spec.distill.prompts import HELD_OUT, Conversation
from edge_spec.distill.request import DistillRequest, require_trainer
from edge_spec.drafters.heads.independent import MedusaNetwork
from edge_spec.errors import EdgeSpecError, UnsupportedModelError, UsageError
from edge_spec.loader.head import open_tables, open_trained_head
from edge_spec.loader.open import OpenModels
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source
from edge_spec.placement.idle_process import LOWEST, IdleProcess, give_way, is_idle
from edge_spec.scheduler.machine import on_battery
from edge_spec.scheduler.profile import stored_weights
from edge_spec.storage.atomic import as_storage_error, atomic_directory, cache_directory, try_hold

DIRECTORY = "learnt"  # in the cache
MAX_BYTES = 200_000_000  # of a model's answers; the oldest are removed first
LEAST_TOKENS, LEAST_ANSWERS = 1000, 4  # new ones required for a training
_MORE = 0.1  # share of new text that justifies another training
_NAME = re.compile(r"(\d{8})-(\d+)\.npz")
_log = logging.getLogger(__name__)


class KeptAnswer(NamedTuple):
    number: int  # in the order of arrival
    num_tokens: int

    @property
    def is_held_out(self) -> bool:
        return self.number % HELD_OUT == 1


class HeadReport(NamedTuple):
    """until: number of the first answer that the head has not seen. learnt_tokens: tokens in
    training. speedup: forecast over plain decoding."""

    until: int
    learnt_tokens: int
    speedup: float

    @property
    def pays(self) -> bool:
        return self.speedup > 1


@dataclass(frozen=True)
class LearntFolder:
    """One model's answers, and the head trained on them."""

    path: Path
    max_bytes: int = MAX_BYTES

    @property
    def head(self) -> Path:
        return self.path / "head"

    @property
    def training(self) -> Path:
        return self.path / "training"

    @property
    def is_forgotten(self) -> bool:
        return not self._answers.is_dir()

    @property
    def num_bytes(self) -> int:
        return sum(each.stat().st_size for each in self.path.rglob("*") if each.is_file())

    @property
    def _answers(self) -> Path:
        return self.path / "answers"

    def make(self) -> None:
        """Raises StorageError."""
        with as_storage_error(self.path, refusals=True):
            self.path.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._answers.mkdir(exist_ok=True)

    def forget(self) -> int:
        """Remove the folder; return its size in bytes. Raises OSError."""
        found, path = self.num_bytes, self.path
        path.rename(path.with_name(f".{path.name}-{uuid4().hex}"))
        for each in path.parent.glob(f".{path.name}-*"):  # leftovers of a kill, too
            shutil.rmtree(each)
        return found

    def answers(self) -> list[KeptAnswer]:
        """Return the stored answers by number, without reading files."""
        with suppress(FileNotFoundError):
            found = (_NAME.fullmatch(path.name) for path in self._answers.iterdir())
            return sorted(KeptAnswer(int(each[1]), int(each[2])) for each in found if each)
        return []

    def add(self, prompt: Sequence[int], tokens: np.ndarray, states: np.ndarray) -> None:
        """Store an answer; remove the oldest ones beyond the limit. states: [tokens, hidden_size]
        that chose the tokens. Raises FileNotFoundError if the folder was removed, StorageError,
        OSError."""
        answers = self.answers()
        number = answers[-1].number + 1 if answers else 0
        arrays = {"prompt": np.array(prompt, np.int64), "tokens": tokens, "states": to_half(states)}
        save_arrays(self._file(KeptAnswer(number, len(tokens))), arrays, mode=0o600)
        sizes = [(each, self._file(each).stat().st_size) for each in self.answers()]
        left = sum(size for _, size in sizes)
        for each, size in sizes[:-1]:
            if left > self.max_bytes:
                self._file(each).unlink()
                left -= size

    def examples(self, answers: Sequence[KeptAnswer], target: ModelConfig) -> Iterator[Example]:
        """Yield examples; remove answers that are damaged or another target's."""
        for each in answers:
            path = self._file(each)
            try:
                yield _example(load_arrays(path)[0], target, each.is_held_out)
            except FileNotFoundError:
                continue
            except (ValueError, KeyError) as error:
                _log.warning("%s is damaged and is left out: %s", path, error)
                path.unlink(missing_ok=True)

    def report(self) -> HeadReport | None:
        """Return None without a readable report."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            found = json.loads((self.head / "report.json").read_bytes())
            learnt, speedup = found["tokens"]["learnt"], found["forecast"]["speedup"]
            return HeadReport(int(found["until"]), int(learnt), float(speedup))
        return None

    def unfinished(self) -> int | None:
        """Return the number of the first answer that an unfinished training excludes."""
        names = (path.stem.rpartition("-")[2] for path in self.training.glob("training-*.npz"))
        return next((int(name) for name in names if name.isdecimal()), None)

    def has_work(self) -> bool:
        """Return True if a training is unfinished or enough answers are new."""
        answers, report = self.answers(), self.report()
        if {each.is_held_out for each in answers} != {True, False}:
            return False
        if self.unfinished() is not None:
            return True
        until, learnt = (report.until, report.learnt_tokens) if report else (0, 0)
        new = [each.num_tokens for each in answers if each.number >= until]
        return len(new) >= LEAST_ANSWERS and sum(new) >= max(LEAST_TOKENS, _MORE * learnt)

    def _file(self, answer: KeptAnswer) -> Path:
        return self._answers / f"{answer.number:08}-{answer.num_tokens}.npz"


def folder_of(name: str, *parts: str) -> LearntFolder:
    """parts: all that a model's hidden states depend on."""
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return LearntFolder(cache_directory() / DIRECTORY / f"{name}-{digest}")


def kept_folders() -> list[Path]:
    with suppress(OSError):
        paths = sorted((cache_directory() / DIRECTORY).iterdir())
        return [path for path in paths if path.is_dir() and not path.name.startswith(".")]
    return []


def document(path: Path) -> dict[str, Any]:
    """Return an entry of `edge-spec learn status --json`."""
    folder = LearntFolder(path)
    answers, report = folder.answers(), folder.report()
    return {
        "model": path.name.rpartition("-")[0],
        "path": str(path),
        "answers": len(answers),
        "answer_tokens": sum(each.num_tokens for each in answers),
        "bytes": folder.num_bytes,
        "learnt_tokens": report.learnt_tokens if report else 0,
        "drafts": report is not None and report.pays,
        "gain": report.speedup if report else None,
    }


def _example(arrays: dict[str, np.ndarray], target: ModelConfig, is_held_out: bool) -> Example:
    """Raises ValueError, KeyError for another target's answer."""
    prompt, tokens, states = (arrays[name] for name in ("prompt", "tokens", "states"))
    text = np.concatenate([prompt, tokens]).astype(np.int32)
    if states.shape != (len(tokens), target.hidden_size) or text.max() >= target.vocab_size:
        raise ValueError("it is of another model")
    conversation = Conversation(text, len(prompt), is_held_out)
    return Example(conversation, len(prompt) - 1, states[:, None])


QUIET_S = 8.0  # pause after an answer before learning
MOST_S_A_DAY = 1800.0  # of one core for an engine: 5 Wh at 10 W
_MOST_S = 2 * MOST_S_A_DAY  # for one process, which then counts as hung
_KEPT_EVERY_S = 10.0
_EPOCHS, _LEAST_STEPS = 8, 300  # a step reads at least one answer
_LOOKED_EVERY_S = 2.0
_LEAST_TOKENS = 8  # of an answer worth learning from
_SHARES = "a head that learns here shares"


def require_learnable(asked: AskedOptions) -> None:
    """Raises UsageError if other drafters were requested, MissingDependencyError."""
    if asked.draft not in (None, (), [], "none") or asked.drafter != "auto":
        raise UsageError(
            "--learn trains who drafts, and other drafters were asked for",
            remedy="Leave --draft and --drafter out, or --learn.",
        )
    require_trainer()


def start_learning(models: OpenModels) -> Learner:
    """Raises UnsupportedModelError, UsageError without support by the model or runtime,
    StorageError."""
    target, placed = models.target, models.prepared
    name, runtime = placed.target.name, placed.target.runtime.name
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
    return Learner(models)


class Learner:
    """Stores answers and opens trained heads; if another process learns from the model, only the
    latter."""

    def __init__(self, models: OpenModels) -> None:
        """Raises StorageError."""
        placed = models.prepared
        source, target = placed.source, placed.target
        self._placed, self._models = placed, models
        self._name = source.name
        weights, runtime = stored_weights(target), target.runtime.name
        self._folder = folder_of(source.name, source.identity, weights, runtime)
        self._release = try_hold(self._folder.path)
        self._folder.make()
        self._report: HeadReport | None = None
        self._head: MedusaNetwork | None = None
        self._is_taking = self._release is not None
        self._spent_s = defaultdict[str, float](float)  # learning time by day
        self._writer = ThreadPoolExecutor(1, "edge-spec-learn")
        self._process = IdleProcess(self._learn, self._may_begin, quiet_s=QUIET_S)
        self._take_head()
        if self._release is not None:
            self._process.start()
            return
        _log.warning(
            "another process learns from %s: this one keeps no answers, and drafts with what was "
            "learnt",
            self._name,
        )

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
        try:
            if self._folder.is_forgotten:
                self._report, self._head = None, None
                self._folder.make()
            else:
                self._folder.add(prompt, tokens, states)
        except FileNotFoundError:
            return
        except (EdgeSpecError, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_taking = False
        _log.warning("nothing more is learnt from answers of %s: %s", self._name, error)

    def _may_begin(self) -> bool:
        may = self._is_taking and self._spent_s[_today()] < MOST_S_A_DAY
        return may and self._folder.has_work() and is_idle()

    def _learn(self, stop: Event) -> None:
        began_s = time.monotonic()
        given = {
            "folder": str(self._folder.path),
            "model": self._placed.source.model,
            "passes_s": dict(self._models.costs().measured),
            "eos_ids": list(self._placed.target.text.eos_ids),
            "most_s": MOST_S_A_DAY - self._spent_s[_today()],
        }
        try:
            isolated(learn_while_idle, json.dumps(given), timeout_s=_MOST_S, stop=stop)
        except IsolatedError as error:
            if not stop.is_set():
                self._give_up(error)
            raise
        finally:
            self._spent_s[_today()] += time.monotonic() - began_s
            self._take_head()

    def _take_head(self) -> None:
        """Open a new head if it pays; a damaged one does not draft."""
        report = self._folder.report()
        if report == self._report:
            return
        self._report, self._head = report, None
        placed, path = self._placed, self._folder.head
        try:
            if report is not None and report.pays:
                threads = placed.target.how.threads
                head = open_trained_head(path, placed.source, placed.target, threads, keeps=False)
                assert isinstance(head, MedusaNetwork)
                self._head = head
        except (EdgeSpecError, ValueError, OSError) as error:
            _log.warning("what was learnt for %s cannot be used: %s", self._name, error)


def learn_while_idle(assignment: str) -> None:
    """Train a head on one core with the lowest priority. Raises an EdgeSpecError, OSError."""
    give_way(LOWEST)
    given = json.loads(assignment)
    folder = LearntFolder(Path(given["folder"]))
    try:
        train_head(folder, given, _Watch(folder, given["most_s"]))
    except KeyboardInterrupt:
        pass  # the machine is needed; progress is saved
    except OSError:
        if not folder.is_forgotten:
            raise
    finally:
        if folder.is_forgotten:
            shutil.rmtree(folder.path, ignore_errors=True)  # files written meanwhile


def train_head(folder: LearntFolder, given: dict[str, Any], progress: Progress) -> None:
    """given: `model`, whose output matrix the head shares; `passes_s`, seconds of passes by rows;
    `eos_ids`. Raises an EdgeSpecError, OSError, and what `progress` raises."""
    from edge_spec.distill.training import Lesson, train  # lazy: imports PyTorch

    weights = open_tables(Source(given["model"], lambda what, fraction: None), _SHARES)
    answers = folder.answers()
    until = folder.unfinished()
    until = answers[-1].number + 1 if until is None else until
    seen = [each for each in answers if each.number < until]
    examples = list(folder.examples(seen, weights.config))
    if {each.conversation.is_held_out for each in examples} != {True, False}:
        shutil.rmtree(folder.training, ignore_errors=True)  # its answers were removed
        return
    learnt = [each.conversation for each in examples if not each.conversation.is_held_out]
    request = DistillRequest(kind="medusa", epochs=max(_EPOCHS, _LEAST_STEPS // len(learnt)))
    ids = choose_scored(learnt, weights.config, None, given["eos_ids"])
    passes_s = {int(rows): seconds for rows, seconds in given["passes_s"].items()}
    timed = partial(time_head, source=weights)
    lesson = Lesson(
        *(examples, weights, ids, passes_s, timed, folder.training),
        threads=1,
        # Named by number alone, so that a removed answer does not restart it.
        name=f"{until:08}",
        save_every_s=_KEPT_EVERY_S,
    )
    drafter, report = train(lesson, request, progress)
    with atomic_directory(folder.head) as work:
        drafter.write(work)
        (work / "report.json").write_text(json.dumps(report | {"until": until}), encoding="utf-8")
    shutil.rmtree(folder.training, ignore_errors=True)


class _Watch:
    """Interrupts a training when the machine is needed, and aborts it when its answers were
    removed. most_s: processor time."""

    def __init__(self, folder: LearntFolder, most_s: float) -> None:
        self._folder, self._most_s = folder, most_s
        self._looked_s = time.monotonic()

    def __call__(self, what: str, fraction: float) -> None:
        if self._folder.is_forgotten:
            raise FileNotFoundError(self._folder.path)
        if time.monotonic() - self._looked_s < _LOOKED_EVERY_S:
            return
        self._looked_s = time.monotonic()
        if time.process_time() > self._most_s or on_battery():
            raise KeyboardInterrupt


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")
