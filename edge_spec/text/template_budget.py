"""What a chat template may use of time and memory, and what each of its operations would take.

- Every value that a template makes weighs at most `TemplateLimits.value`: its characters and items,
one
  that appears twice counted twice, so that comparing or printing it takes as long as it weighs.
- It is nested at most _MAX_DEPTH deep: Python hashes a tuple in a tuple on the stack of C.
- All of them together have at most `TemplateLimits.total` characters and items of their own.
- The processor time of the thread is looked at every few steps, of which a long value that is read
  is many.

The bounds grow with the conversation, so none that people have comes near them.
"""

from __future__ import annotations

import re
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from dataclasses import dataclass
from string import Formatter
from types import MappingProxyType
from typing import Any

from jinja2.utils import Namespace

_MAX_WIDTH = 10_000  # of padding and indentation
_MAX_DEPTH = 200  # of containers in containers; tools have some 20
_MAX_BITS = 4096  # of an integer
_MAX_DIGITS = 300  # that a number is rounded to
_MAX_ATTRIBUTE_CHARACTERS = 200
_MAX_ATTRIBUTE_PARTS = 16
_MAX_SEARCH = 10**9  # characters compared; searches from the right have no better bound
_STEPS_A_LOOK = 64  # at the clock
_ITEMS_A_STEP = 4096

_CONTAINERS = (list, tuple, dict, set, frozenset)
_SEQUENCES = (str, bytes, list, tuple)
_VIEWS = (KeysView, ValuesView, ItemsView)  # of mappings
_WIDE = re.compile(r"\d{5}|%[#0\- +]*\d*\.?\*")  # of a text with "%" in it
_NUMBER = re.compile(r"\d+")
_FLOAT_CHARACTERS = 310  # of the largest one
_WIDE_FIELD = re.compile(r"\d{5}|[{]")


class LimitError(Exception):
    """What a template did too much of; the text completes "the chat template ..."."""


@dataclass(frozen=True)
class TemplateLimits:
    value: int  # characters and items
    total: int
    seconds: float

    @classmethod
    def of(cls, num_characters: int) -> TemplateLimits:
        """Makes the limits for a conversation of so many characters."""
        return cls(
            value=1_000_000 + 16 * num_characters,
            total=32_000_000 + 256 * num_characters,
            seconds=2 + 4e-6 * num_characters,
        )


class TemplateBudget:
    """What one run may still use. Its methods raise LimitError where that is over."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._end_s = time.thread_time() + limits.seconds
        self._steps: float = 0
        self._made = 0
        # Containers by id, with what they weigh and how deep they are; held, so that no id comes
        # twice.
        self._weights: dict[int, tuple[Any, int, int]] = {}

    def step(self, num_steps: float = 1) -> None:
        self._steps += num_steps
        if self._steps >= _STEPS_A_LOOK:
            self._steps = 0
            if time.thread_time() > self._end_s:
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
                _check_bits(value.bit_length())
            return value
        return self.copied(value)

    def copied(self, value: Any) -> Any:
        """Counts as `made` does, for what weighs no more than a value that was counted."""
        if isinstance(value, _SEQUENCES):
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


def check_fields(budget: TemplateBudget, text: str, *args: Any, **kwargs: Any) -> None:
    """Checks the fields of str.format and str.format_map."""
    size = len(text)
    largest = max(map(budget.weight, (*args, *kwargs.values())), default=0)
    for _, name, form, _ in Formatter().parse(text):
        if name is None:
            continue
        if _WIDE_FIELD.search(form or ""):
            raise LimitError("formats with a width of more than 9,999")
        size += largest + _FLOAT_CHARACTERS + sum(map(int, _NUMBER.findall(form or "")))
        budget.require(size)


def num_parts(*values: Any) -> int:
    """Counts the parts of the attributes that these are names of: each is looked up for every
    item."""
    return 1 + sum(v.count(".") + v.count(",") for v in values if isinstance(v, str))


def check_attributes(*values: Any) -> None:
    """Checks the attributes of filters that take the name of one."""
    if any(isinstance(v, str) and len(v) > _MAX_ATTRIBUTE_CHARACTERS for v in values):
        raise LimitError("names an attribute that is too long")
    if num_parts(*values) > _MAX_ATTRIBUTE_PARTS:
        raise LimitError("names an attribute of too many parts")


def check_width(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise LimitError(f"asks for a width of more than {_MAX_WIDTH:,}")


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise LimitError(f"computes with numbers of more than {_MAX_BITS:,} bits")


def _check_product(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            size = len(value) if isinstance(value, str) else budget.weight(value)
            budget.require(size * max(count, 0))


def _check_quotient(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(max(left.bit_length(), right.bit_length()))


def _check_power(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_sum(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        budget.require(len(left) + len(right))


def _check_remainder(budget: TemplateBudget, left: Any, right: Any) -> None:
    """Or a format and what it writes."""
    if isinstance(left, str):
        _check_format(budget, left, right)
    else:
        _check_quotient(budget, left, right)


def _check_format(budget: TemplateBudget, value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, str) and "%" in value:
        if _WIDE.search(value):
            raise LimitError("formats with a width of more than 9,999")
        largest = max(map(budget.weight, (*args, *kwargs.values())), default=0)
        widest = max(map(int, _NUMBER.findall(value)), default=0)
        each = largest + _FLOAT_CHARACTERS + 2 * widest  # a width, and a precision
        budget.require(len(value) + value.count("%") * each)


def check_join(budget: TemplateBudget, items: Any, d: Any = "", attribute: Any = None) -> None:
    """items: no iterator."""
    check_attributes(attribute)
    count = len(items) if hasattr(items, "__len__") else 0
    budget.require(budget.weight(items) + count * budget.weight(d))


def check_replace(
    budget: TemplateBudget, text: Any, old: Any = "", new: Any = "", *count: Any
) -> None:
    text, old, new = (budget.text(value) for value in (text, old, new))
    budget.require(len(text) + text.count(old) * len(new))


def check_search(budget: TemplateBudget, text: Any, part: Any = "", *args: Any) -> None:
    """Checks a search from the right, or for any of the characters of `part`."""
    if isinstance(text, str) and isinstance(part, str) and len(part) > 1:
        if len(text) * len(part) > _MAX_SEARCH:
            raise LimitError("searches for too long a text")
        budget.read(text, len(part))


def _check_indent(
    budget: TemplateBudget, text: Any, width: Any = 4, *args: Any, **kwargs: Any
) -> None:
    check_width(width)
    added = width if isinstance(width, int) else len(width)
    text = budget.text(text)
    budget.require(len(text) + len(text.splitlines()) * added)


def _check_round(
    budget: TemplateBudget, value: Any, precision: Any = 0, *args: Any, **kw: Any
) -> None:
    if isinstance(precision, int) and abs(precision) > _MAX_DIGITS:
        raise LimitError(f"rounds to more than {_MAX_DIGITS} digits")


def _check_total(budget: TemplateBudget, items: Any, attribute: Any = None, start: Any = 0) -> None:
    check_attributes(attribute)
    if not isinstance(start, int | float):
        raise LimitError("sums what is no number")


def _check_names(budget: TemplateBudget, items: Any, *args: Any, **kwargs: Any) -> None:
    check_attributes(*args, *kwargs.values())


OPERATORS: Mapping[str, Callable[[TemplateBudget, Any, Any], None]] = MappingProxyType(
    {
        "*": _check_product,
        "**": _check_power,
        "+": _check_sum,
        "//": _check_quotient,
        "%": _check_remainder,
    }
)
NAMING = ("groupby", "map", "max", "min", "rejectattr", "selectattr", "sort", "unique")
FILTERS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        **dict.fromkeys(NAMING, _check_names),
        "format": _check_format,
        "indent": _check_indent,
        "join": check_join,
        "replace": check_replace,
        "round": _check_round,
        "sum": _check_total,
        "trim": check_search,
    }
)
