"""Let the target write conversations, each stored on disk when it is finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.distill.cluster import Machine, Writer
from edge_spec.distill.prompts import Conversation, Tasks
from edge_spec.errors import UsageError

ANSWERS_FILE = "answers.jsonl"
_TICK_S = 0.5  # delay of noticing an interrupt, on every system
_SHARE_SCORED, _LEAST_SCORED = 50, 4096


class ConversationFile:
    """One run's conversations of tasks 0, 1, ..., a JSON line each, as they were finished; a task
    may have none. A kill loses unfinished ones, damage also those after it. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._done: dict[int, Conversation | None] = {}
        path = folder / ANSWERS_FILE
        path.touch()
        self._file = path.open("r+b")
        end = 0
        for line in self._file:
            found = _parse(line)
            if found is None:
                break
            self._done[found[0]] = found[1]
            end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def add(self, task: int, found: Conversation | None) -> None:
        entry: list[object] = [task, 0, False, []]
        if found is not None:
            entry = [task, found.start, found.is_held_out, found.tokens.tolist()]
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        self._done[task] = found

    def has(self, task: int) -> bool:
        return task in self._done

    def first(self, num_answered: int) -> list[Conversation]:
        """Return conversations in task order, up to `num_answered` answer tokens or the first
        unfinished task."""
        found: list[Conversation] = []
        task = 0
        while num_answered > 0 and task in self._done:
            each = self._done[task]
            task += 1
            if each is not None:
                num_answered -= each.num_answered
                found.append(each)
        return found

    def close(self) -> None:
        self._file.close()


def _parse(line: bytes) -> tuple[int, Conversation | None] | None:
    with suppress(OverflowError, TypeError, ValueError):
        task, start, is_held_out, tokens = json.loads(line)
        found = Conversation(np.array(tokens, np.int32), int(start), bool(is_held_out))
        if line.endswith(b"\n"):
            return int(task), found if tokens else None
    return None


def write_answers(
    machine: Machine, tasks: Tasks, folder: Path, num_tokens: int, progress: Progress
) -> list[Conversation]:
    """Return conversations with `num_tokens` answer tokens, or all of the tasks'. folder: stores
    finished ones, and is resumed. Raises UsageError if the tasks yield too little, an
    EdgeSpecError, OSError."""
    file = ConversationFile(folder)

    def is_enough() -> bool:
        written = count_answered(file.first(num_tokens))
        progress("Writing answers", min(1.0, written / num_tokens))
        return written >= num_tokens

    try:
        if not is_enough():
            numbers = count() if tasks.count is None else range(tasks.count)
            with machine.writers() as writers:
                left = (each for each in numbers if not file.has(each))
                _write_all(writers, left, file, is_enough)
        found = file.first(num_tokens)
    finally:
        file.close()
    if {each.is_held_out for each in found} != {True, False}:
        raise UsageError(
            f"{count_answered(found)} tokens of answers are too few to learn from and to "
            "measure on",
            remedy="Give more prompts, or a larger --tokens.",
        )
    return found


def _write_all(
    writers: Sequence[Writer],
    tasks: Iterator[int],
    file: ConversationFile,
    is_enough: Callable[[], bool],
) -> None:
    """Run tasks in order, one per writer, until enough are finished."""
    free, stop = list(writers), Event()
    working: dict[Future[Conversation | None], tuple[int, Writer]] = {}
    with ThreadPoolExecutor(len(writers)) as pool:
        try:
            while True:
                while free and not is_enough():
                    task = next(tasks, None)
                    if task is None:
                        break
                    writer = free.pop()
                    working[pool.submit(writer, task, stop)] = task, writer
                if not working:
                    return
                for each in wait(working, _TICK_S, FIRST_COMPLETED).done:
                    task, writer = working.pop(each)
                    file.add(task, each.result())
                    free.append(writer)
        except BaseException:
            stop.set()
            raise


def count_answered(conversations: Iterable[Conversation]) -> int:
    return sum(each.num_answered for each in conversations)


def choose_scored(
    conversations: Iterable[Conversation],
    config: ModelConfig,
    vocabulary: int | None,
    eos_ids: Sequence[int],
) -> np.ndarray:
    """Return the token ids that a drafter scores, [tokens] int64 ascending: the end tokens, then
    the most frequent ones in answers, then in prompts, then the lowest ids, since vocabularies
    begin with frequent tokens. vocabulary: how many; None: `default_scored`."""
    size = config.vocab_size
    wanted = min(size, vocabulary or default_scored(config))
    answers, prompts = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for each in conversations:
        answers += np.bincount(each.tokens[each.start :], minlength=size)
        prompts += np.bincount(each.tokens[: each.start], minlength=size)
    counts = answers * (1 + int(prompts.sum())) + prompts
    counts[list(eos_ids)] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")[:wanted]
    written = order[counts[order] > 0]
    others = np.setdiff1d(np.arange(size), written)[: wanted - len(written)]
    found: np.ndarray = np.sort(np.concatenate([written, others]))
    return found


def default_scored(config: ModelConfig) -> int:
    """Return a multiple of 1,024; few for a small model."""
    rows = config.num_parameters // (_SHARE_SCORED * config.hidden_size)
    return max(_LEAST_SCORED, rows // 1024 * 1024)


def coverage(conversations: Iterable[Conversation], token_ids: np.ndarray) -> float:
    """Return the scored share of answer tokens."""
    answers = np.concatenate([each.tokens[each.start :] for each in conversations])
    return float(np.isin(answers, token_ids).mean())
