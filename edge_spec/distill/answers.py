"""The target writes conversations: several at a time, where its runtime lets them share passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Condition, Event, Thread

from edge_spec.core.model import Progress
from edge_spec.core.shared_pass import SharesPasses
from edge_spec.distill.conversations import Conversation, ConversationFile, count_answered
from edge_spec.distill.prompts import Tasks
from edge_spec.engine.engine import Engine
from edge_spec.errors import DeviceError, UsageError

CONVERSATIONS = 8  # at a time
_TOLD_EVERY_S = 0.5


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
        self._changed = Condition()
        self._stop = Event()
        self._next = 0
        self._given_back: list[int] = []
        self._num_at_work = 0
        self._errors: list[BaseException] = []

    def run(self, writers: Writers) -> None:
        if self._is_enough():
            return
        self._tell()
        with writers() as opened:
            workers = [Thread(target=self._work, args=(each,)) for each in opened]
            for worker in workers:
                worker.start()
            try:
                while any(worker.is_alive() for worker in workers):
                    workers[0].join(_TOLD_EVERY_S)
                    if not workers[0].is_alive():
                        for worker in workers:
                            worker.join(_TOLD_EVERY_S)
                    self._tell()
            finally:
                self._stop.set()
                with self._changed:
                    self._changed.notify_all()
                for worker in workers:
                    worker.join()
        if self._errors:
            raise self._errors[0]
        if self._given_back and not self._is_enough():
            raise DeviceError(
                "all machines that wrote answers are gone",
                remedy="Start them again: the same command goes on with what is written.",
            )

    def _work(self, writer: Writer) -> None:
        try:
            while (task := self._taken()) is not None:
                try:
                    found = writer(task, self._stop)
                except WriterLostError:
                    self._ended(task)
                    return
                if self._stop.is_set():
                    return
                with self._changed:
                    self._file.add(task, found)
                self._ended()
        except BaseException as error:  # is raised where the run was begun
            self._errors.append(error)
            self._stop.set()
            self._ended()

    def _taken(self) -> int | None:
        """Waits while others are at the last tasks, one of which may be given back."""
        with self._changed:
            while not self._stop.is_set() and not self._is_enough():
                task = self._free_task()
                if task is not None:
                    self._num_at_work += 1
                    return task
                if not self._num_at_work:
                    break
                self._changed.wait()
            return None

    def _free_task(self) -> int | None:
        if self._given_back:
            return self._given_back.pop()
        while self._file.has(self._next):
            self._next += 1
        if self._tasks.count is not None and self._next >= self._tasks.count:
            return None
        self._next += 1
        return self._next - 1

    def _ended(self, given_back: int | None = None) -> None:
        with self._changed:
            self._num_at_work -= 1
            if given_back is not None:
                self._given_back.append(given_back)
            self._changed.notify_all()

    def _is_enough(self) -> bool:
        return count_answered(self._file.until(self._num_tokens)) >= self._num_tokens

    def _tell(self) -> None:
        with self._changed:
            written = count_answered(self._file.until(self._num_tokens))
        self._progress("Writing answers", min(1.0, written / self._num_tokens))


@contextmanager
def local_writers(engine: Engine, tasks: Tasks) -> Iterator[Sequence[Writer]]:
    """Conversations of one engine, which share passes where its runtime lets them."""
    with ExitStack() as opened:
        engines = [engine]
        if isinstance(engine.parts.model, SharesPasses):
            engines += [opened.enter_context(engine.fork()) for _ in range(CONVERSATIONS - 1)]
        yield [partial(tasks.conversation, each) for each in engines]
