"""The target writes conversations, which are kept on disk as they come: several at a time, where
its runtime lets them share passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.runtime_protocols import SharesPasses
from edge_spec.distill.prompts import Conversation, Tasks
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceError, UsageError

ANSWERS_FILE = "answers.jsonl"
KEPT_DAYS = 7  # of unfinished work


class ConversationFile:
    """The conversations of tasks 0, 1, ... of one run, a line of JSON each, in the order in which
    they were done.

    A task may have none: what was written was not worth answering, say. A kill loses the ones that
    were being written, and damage those after it. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._done: dict[int, Conversation | None] = {}
        path = folder / ANSWERS_FILE
        path.touch()
        self._file = path.open("r+b")
        end = 0
        for line in self._file:
            found = _parsed(line)
            if found is None:
                break
            self._done[found[0]] = found[1]
            end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def add(self, task: int, found: Conversation | None) -> None:
        told: list[object] = [task, 0, False, []]
        if found is not None:
            told = [task, found.start, found.is_held_out, found.tokens.tolist()]
        self._file.write(json.dumps(told).encode() + b"\n")
        self._file.flush()
        self._done[task] = found

    def has(self, task: int) -> bool:
        return task in self._done

    def until(self, num_answered: int) -> list[Conversation]:
        """Returns those of the first tasks, in their order, up to `num_answered` tokens of answers:
        the same whatever was done first. They end before a task that is not done."""
        return list(self._until(num_answered))

    def _until(self, num_answered: int) -> Iterator[Conversation]:
        task = 0
        while num_answered > 0 and task in self._done:
            found = self._done[task]
            task += 1
            if found is not None:
                num_answered -= found.num_answered
                yield found

    def close(self) -> None:
        self._file.close()


def _parsed(line: bytes) -> tuple[int, Conversation | None] | None:
    """Returns a task and its conversation; None for a line that is damaged or was not finished."""
    with suppress(OverflowError, TypeError, ValueError):
        task, start, is_held_out, tokens = json.loads(line)
        found = Conversation(np.array(tokens, np.int32), int(start), bool(is_held_out))
        if line.endswith(b"\n"):
            return int(task), found if tokens else None
    return None


def count_answered(conversations: Sequence[Conversation]) -> int:
    return sum(each.num_answered for each in conversations)


def most_written(
    conversations: Iterable[Conversation], vocab_size: int, count: int, always: Sequence[int] = ()
) -> np.ndarray:
    """[at most count] int64, ascending: the tokens that answers have most often, then those of
    prompts. always: tokens that are among them, such as the end of a text."""
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for each in conversations:
        answers += np.bincount(each.tokens[each.start :], minlength=vocab_size)
        prompts += np.bincount(each.tokens[: each.start], minlength=vocab_size)
    counts = answers * (1 + int(prompts.sum())) + prompts
    counts[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")[:count]
    found: np.ndarray = np.sort(order[counts[order] > 0])
    return found


def filled_up(token_ids: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """[at most count] int64, ascending: these tokens and the lowest others. Vocabularies begin with
    what is frequent, and few answers have only a part of what is written later."""
    others = np.setdiff1d(np.arange(vocab_size), token_ids)
    found: np.ndarray = np.sort(np.append(token_ids, others[: max(0, count - len(token_ids))]))
    return found


def with_others(token_ids: np.ndarray, vocab_size: int, count: int, seed: int) -> np.ndarray:
    """[at most count more] int64, ascending: these tokens and some that are drawn of all others. A
    drafter that drafts from the whole vocabulary learns from them that they are seldom written
    (cf. sampled softmax, Jean et al. 2015)."""
    others = np.setdiff1d(np.arange(vocab_size), token_ids)
    drawn = np.random.default_rng(seed).permutation(others)[:count]
    found: np.ndarray = np.sort(np.concatenate([token_ids, drawn]))
    return found


def coverage(conversations: Iterable[Conversation], token_ids: np.ndarray) -> float:
    answers = np.concatenate([each.tokens[each.start :] for each in conversations])
    return float(np.isin(answers, token_ids).mean())


CONVERSATIONS = 8  # at a time
_TICK_S = 0.5  # within which an interrupt is noticed on every system

# Answers as `Tasks.conversation` does. Raises WriterLostError where another one has to do it.
Writer = Callable[[int, Event], Conversation | None]
# Opens those who write conversations of tasks: as many as write at a time.
Writers = Callable[[], AbstractContextManager[Sequence[Writer]]]


class WriterLostError(Exception):
    """A writer is gone; its task is as it was before."""


def write_answers(
    writers: Writers, tasks: Tasks, folder: Path, num_tokens: int, progress: Progress
) -> list[Conversation]:
    """Returns conversations with `num_tokens` tokens of answers, or all that the tasks give.

    folder: keeps each as soon as it is written, and is gone on with. Raises UsageError where too
    little comes of the tasks, an EdgeSpecError, OSError.
    """
    file = ConversationFile(folder)

    def is_enough() -> bool:
        written = count_answered(file.until(num_tokens))
        progress("Writing answers", min(1.0, written / num_tokens))
        return written >= num_tokens

    try:
        if not is_enough():
            with writers() as opened:
                _write_all(opened, tasks, file, is_enough)
        found = file.until(num_tokens)
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
    tasks: Tasks,
    file: ConversationFile,
    is_enough: Callable[[], bool],
) -> None:
    """Has the tasks done in their order, until those that are done have enough tokens. Raises
    DeviceError where all writers are lost."""
    numbers = count() if tasks.count is None else range(tasks.count)
    left, given_back = (each for each in numbers if not file.has(each)), list[int]()
    free, stop = list(writers), Event()
    working: dict[Future[Conversation | None], tuple[int, Writer]] = {}
    with ThreadPoolExecutor(len(writers)) as pool:
        try:
            while True:
                while free and not is_enough():
                    task = given_back.pop() if given_back else next(left, None)
                    if task is None:
                        break
                    writer = free.pop()
                    working[pool.submit(writer, task, stop)] = task, writer
                if not working:
                    break
                for each in wait(working, _TICK_S, FIRST_COMPLETED).done:
                    task, writer = working.pop(each)
                    try:
                        file.add(task, each.result())
                        free.append(writer)
                    except WriterLostError:
                        given_back.append(task)
        except BaseException:
            stop.set()
            raise
    if given_back and not is_enough():
        raise DeviceError(
            "all machines that wrote answers are gone",
            remedy="Start them again: the same command goes on with what is written.",
        )


@contextmanager
def local_writers(engine: Engine, tasks: Tasks) -> Iterator[Sequence[Writer]]:
    """Conversations of one engine, which share passes where its runtime lets them."""
    with ExitStack() as opened:
        engines = [engine]
        if isinstance(engine.parts.model, SharesPasses):
            engines += [opened.enter_context(engine.fork()) for _ in range(CONVERSATIONS - 1)]
        yield [partial(tasks.conversation, each) for each in engines]
