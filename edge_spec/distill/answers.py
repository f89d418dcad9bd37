"""The target writes conversations: several at a time, where its runtime lets them share passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Lock, Thread

from edge_spec.core.model import Progress
from edge_spec.core.shared_pass import SharesPasses
from edge_spec.distill.conversations import Conversation, ConversationFile, count_answered
from edge_spec.distill.prompts import Tasks
from edge_spec.engine.engine import Engine
from edge_spec.errors import UsageError

CONVERSATIONS = 8  # at a time
_TOLD_EVERY_S = 0.5


def write_answers(
    engine: Engine, tasks: Tasks, folder: Path, num_tokens: int, progress: Progress
) -> list[Conversation]:
    """Conversations with so many tokens of answers, or all that the tasks give.

    folder: keeps each as soon as it is written, and is gone on with. Raises UsageError where
    nothing comes of the tasks, an EdgeSpecError, OSError.
    """
    file = ConversationFile(folder)
    try:
        _Writing(tasks, file, num_tokens, progress).run(engine)
        found = file.until(num_tokens)
    finally:
        file.close()
    if not any(each.is_held_out for each in found) or all(each.is_held_out for each in found):
        raise UsageError(
            f"{count_answered(found)} tokens of answers are too few to learn from and to "
            "measure on",
            remedy="Give more prompts, or a larger --tokens.",
        )
    return found


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
        self._errors: list[BaseException] = []

    def run(self, engine: Engine) -> None:
        if self._is_enough():
            return
        self._tell()
        with _conversations(engine) as engines:
            workers = [Thread(target=self._work, args=(each,)) for each in engines]
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
                for worker in workers:
                    worker.join()
        if self._errors:
            raise self._errors[0]

    def _work(self, engine: Engine) -> None:
        try:
            while (task := self._taken()) is not None:
                found = self._tasks.conversation(engine, task, self._stop)
                if self._stop.is_set():
                    return
                with self._lock:
                    self._file.add(task, found)
        except BaseException as error:  # is raised where the run was begun
            self._errors.append(error)
            self._stop.set()

    def _taken(self) -> int | None:
        with self._lock:
            while self._file.has(self._next):
                self._next += 1
            is_last = self._tasks.count is not None and self._next >= self._tasks.count
            if self._stop.is_set() or is_last or self._is_enough():
                return None
            self._next += 1
            return self._next - 1

    def _is_enough(self) -> bool:
        return count_answered(self._file.until(self._num_tokens)) >= self._num_tokens

    def _tell(self) -> None:
        with self._lock:
            written = count_answered(self._file.until(self._num_tokens))
        self._progress("Writing answers", min(1.0, written / self._num_tokens))


@contextmanager
def _conversations(engine: Engine) -> Iterator[list[Engine]]:
    with ExitStack() as opened:
        engines = [engine]
        if isinstance(engine.parts.model, SharesPasses):
            engines += [opened.enter_context(engine.fork()) for _ in range(CONVERSATIONS - 1)]
        yield engines
