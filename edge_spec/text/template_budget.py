"""Bounds what a chat template may use of time and memory.

- Every value that a template makes weighs at most `TemplateLimits.value`: its characters and items,
  one that appears twice counted twice, so that comparing or printing it takes as long as it weighs.
- It is nested at most _MAX_DEPTH deep: Python hashes a tuple in a tuple on the stack of C.
- All of them together have at most `TemplateLimits.total` characters and items of their own.
- The processor time of the thread is looked at every few steps, of which a long value that is read
  is many.

The bounds grow with the conversation, so none that people have comes near them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from typing import Any

from jinja2.utils import Namespace

_MAX_DEPTH = 200  # of containers in containers; tools have some 20
_MAX_BITS = 4096  # of an integer
_STEPS_A_LOOK = 64  # at the clock
_ITEMS_A_STEP = 4096

_CONTAINERS = (list, tuple, dict, set, frozenset)
SEQUENCES = (str, bytes, list, tuple)
_VIEWS = (KeysView, ValuesView, ItemsView)  # of mappings


class LimitError(Exception):
    """Says what a template did too much of; the text completes "the chat template ..."."""


@dataclass(frozen=True)
class TemplateLimits:
    value: int  # characters and items
    total: int
    seconds: float
    clock: Callable[[], float] = time.thread_time  # seconds

    @classmethod
    def of(cls, num_characters: int) -> TemplateLimits:
        """Makes the limits for a conversation of this many characters."""
        return cls(
            value=1_000_000 + 16 * num_characters,
            total=32_000_000 + 256 * num_characters,
            seconds=2 + 4e-6 * num_characters,
        )


class TemplateBudget:
    """Counts what one run may still use. Its methods raise LimitError when that is used up."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._end_s = limits.clock() + limits.seconds
        self._steps: float = 0
        self._made = 0
        # Containers by id, with what they weigh and how deep they are; held, so that no id comes
        # twice.
        self._weights: dict[int, tuple[Any, int, int]] = {}

    def step(self, num_steps: float = 1) -> None:
        self._steps += num_steps
        if self._steps >= _STEPS_A_LOOK:
            self._steps = 0
            if self._limits.clock() > self._end_s:
                raise LimitError(f"ran for more than {self._limits.seconds:.0f} s")

    def read(self, value: Any, times: int = 1) -> Any:
        """The value, and the steps of going through it so often counted."""
        self.step(1 + times * self.weight(value) / _ITEMS_A_STEP)
        return value

    def take(self, value: Any, times: int) -> None:
        """Counts as `read` does, for what may be no longer than what is made."""
        weight = self.weight(value)
        self.require(weight)
        self.step(1 + times * weight / _ITEMS_A_STEP)

    def reading(self, items: Iterator[Any], times: int = 1) -> Iterator[Any]:
        """The items, each read so often."""
        for item in items:
            yield self.read(item, times)

    def require(self, size: int) -> None:
        """size: of a value that is still to be made."""
        if size > self._limits.value:
            raise LimitError(f"makes a value of more than {self._limits.value:,} characters")

    def made(self, value: Any) -> Any:
        """The value, counted."""
        if isinstance(value, str | bytes):
            self.require(len(value))
        elif isinstance(value, _CONTAINERS):
            self.require(self.weight(value))
        else:
            if isinstance(value, int):
                check_bits(value.bit_length())
            return value
        return self.copied(value)

    def copied(self, value: Any) -> Any:
        """Counts as `made` does, for what weighs no more than a value that was counted."""
        if isinstance(value, SEQUENCES):
            size = len(value)
            self._made += size
            if self._made > self._limits.total:
                raise LimitError(f"makes values of more than {self._limits.total:,} characters")
            self.step(1 + size / _ITEMS_A_STEP)
        return value

    def weight(self, value: Any) -> int:
        """Characters and items, those that appear twice counted twice. Raises LimitError for
        what is nested too deeply."""
        if isinstance(value, str | bytes):
            return len(value) + 1
        if isinstance(value, Namespace):  # its content changes, and may be itself
            raise LimitError("uses a namespace as a value")
        if isinstance(value, _VIEWS):
            return 1 + sum(map(self.weight, value))
        if not isinstance(value, _CONTAINERS):
            if isinstance(value, int):
                return 1 + value.bit_length() // 64 * 20  # that many have so many digits
            return 1 + len(value) if isinstance(value, range) else 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        items: Iterable[Any] = value
        if isinstance(value, dict):
            items = (part for pair in value.items() for part in pair)
        total = depth = 1
        for item in items:
            total += self.weight(item)
            if isinstance(item, _CONTAINERS):
                depth = max(depth, 1 + self._weights[id(item)][2])
        if depth > _MAX_DEPTH:
            raise LimitError(f"nests values more than {_MAX_DEPTH} deep")
        self._weights[id(value)] = (value, total, depth)
        return total

    def text(self, value: Any) -> str:
        """Returns the value as jinja2 writes it."""
        if isinstance(value, str):
            return value
        self.require(self.weight(value))
        made: str = self.made(str(value))
        return made


def check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise LimitError(f"computes with numbers of more than {_MAX_BITS:,} bits")
