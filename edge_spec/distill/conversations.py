"""Conversations that a target has written, kept on disk as they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ANSWERS_FILE = "answers.jsonl"


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
    """Returns how many tokens the answers have."""
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
    """Returns the share of answers' tokens that are among these."""
    answers = np.concatenate([each.tokens[each.start :] for each in conversations])
    return float(np.isin(answers, token_ids).mean())
