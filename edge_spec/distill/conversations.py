"""Conversations that a target has written, kept on disk as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_spec.storage.resumable import StepFile

_TOKEN = np.dtype("<i4")


@dataclass(frozen=True, eq=False)
class Conversation:
    """A prompt and the target's answer to it.

    start: of the answer among the tokens, at least 1. is_held_out: measured on, never trained on.
    """

    tokens: np.ndarray  # [tokens] int32
    start: int
    is_held_out: bool

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - self.start


class ConversationFile:
    """The conversations of tasks 0, 1, ... of one run, in the order in which they were done.

    A task may have none: what was written was not worth answering, say. A kill loses the ones that
    were being written, and damage those after it. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._done: dict[int, Conversation | None] = {}
        self._file = StepFile(folder / "answers.bin", folder / "answers.log")
        stored = np.fromfile(folder / "answers.bin", _TOKEN)
        at = 0
        for task, start, is_held_out, count in self._file.steps:
            tokens = stored[at : at + count]
            at += count
            self._done[task] = Conversation(tokens, start, is_held_out) if count else None

    def add(self, task: int, found: Conversation | None) -> None:
        tokens = np.empty(0, _TOKEN) if found is None else found.tokens.astype(_TOKEN)
        self._file.write(tokens.tobytes())
        start, held_out = (0, False) if found is None else (found.start, found.is_held_out)
        self._file.finish([task, start, held_out, len(tokens)])
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
        self._file.__exit__(None)


def count_answered(conversations: Sequence[Conversation]) -> int:
    """Returns how many tokens the answers have."""
    return sum(each.num_answered for each in conversations)
