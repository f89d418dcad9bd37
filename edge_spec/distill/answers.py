"""The target writes conversations: several at a time, where its runtime lets them share passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock

from edge_spec.core.model import Progress
from edge_spec.core.shared_pass import SharesPasses
from edge_spec.distill.conversations import Conversation, ConversationFile, count_answered
from edge_spec.distill.prompts import Tasks
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceError, UsageError

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
    """Writes answers as `write_conversations` does. Raises UsageError where too little comes of the
    tasks."""
    found = write_conversations(writers, tasks, folder, num_tokens, progress)
    if not any(each.is_held_out for each in found) or all(each.is_held_out for each in found):
        raise UsageError(
            f"{count_answered(found)} tokens of answers are too few to learn from and to "
            "measure on",
            remedy="Give more prompts, or a larger --tokens.",
        )
    return found


def write_conversations(
    writers: Writers, tasks: Tasks, folder: Path, num_tokens: int, progress: Progress
) -> list[Conversation]:
    """Returns conversations with `num_tokens` tokens of answers, or all that the tasks give.

    folder: keeps each as soon as it is written, and is gone on with. Raises an EdgeSpecError,
    OSError.
    """
    file = ConversationFile(folder)
    try:
        _Writing(tasks, file, num_tokens, progress).run(writers)
        return file.until(num_tokens)
    finally:
        file.close()


class _Writing:
    """Workers take the tasks in their order, until those that are done have enough tokens."""

    def __init__(
        self, tasks: Tasks, file: ConversationFile, num_tokens: int, progress: Progress
    ) -> None:
        self._tasks = tasks
        self._file = file
        self._num_tokens = num_tokens
        self._progress = progress
        self._lock = Lock()
        self._stop = Event()
        self._next = 0
        self._given_back: list[int] = []  # of lost writers

    def run(self, writers: Writers) -> None:
        if self._is_enough():
            return
        self._tell()
        with writers() as opened:
            left = self._work_all(opened)
            while left and self._has_left_over():
                left = self._work_all(left)
        if self._has_left_over():
            raise DeviceError(
                "all machines that wrote answers are gone",
                remedy="Start them again: the same command goes on with what is written.",
            )

    def _work_all(self, writers: Sequence[Writer]) -> list[Writer]:
        """Returns those that were not lost."""
        with ThreadPoolExecutor(len(writers)) as pool:
            working = [pool.submit(self._work, each) for each in writers]
            try:
                while wait(working, _TICK_S).not_done:
                    pass
            except BaseException:
                self._stop.set()
                raise
        found = [each.result() for each in working]
        return [each for each in found if each is not None]

    def _work(self, writer: Writer) -> Writer | None:
        try:
            while (task := self._take()) is not None:
                try:
                    found = writer(task, self._stop)
                except WriterLostError:
                    self._given_back.append(task)
                    return None
                if self._stop.is_set():
                    break
                with self._lock:
                    self._file.add(task, found)
                    self._tell()
            return writer
        except BaseException:
            self._stop.set()
            raise

    def _take(self) -> int | None:
        with self._lock:
            if self._stop.is_set() or self._is_enough():
                return None
            if self._given_back:
                return self._given_back.pop()
            while self._file.has(self._next):
                self._next += 1
            if self._tasks.count is not None and self._next >= self._tasks.count:
                return None
            self._next += 1
            return self._next - 1

    def _has_left_over(self) -> bool:
        return bool(self._given_back) and not self._is_enough()

    def _is_enough(self) -> bool:
        return self._num_written() >= self._num_tokens

    def _num_written(self) -> int:
        return count_answered(self._file.until(self._num_tokens))

    def _tell(self) -> None:
        self._progress("Writing answers", min(1.0, self._num_written() / self._num_tokens))


@contextmanager
def local_writers(engine: Engine, tasks: Tasks) -> Iterator[Sequence[Writer]]:
    """Conversations of one engine, which share passes where its runtime lets them."""
    with ExitStack() as opened:
        engines = [engine]
        if isinstance(engine.parts.model, SharesPasses):
            engines += [opened.enter_context(engine.fork()) for _ in range(CONVERSATIONS - 1)]
        yield [partial(tasks.conversation, each) for each in engines]
