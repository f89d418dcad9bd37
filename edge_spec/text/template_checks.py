"""Holds what each operation of a chat template would take against its budget before it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from edge_spec.text.template_budget import SEQUENCES, LimitError, TemplateBudget, check_bits

_MAX_WIDTH = 10_000  # of padding and indentation
_MAX_DIGITS = 300  # that a number is rounded to
_MAX_ATTRIBUTE_CHARACTERS = 200
_MAX_ATTRIBUTE_PARTS = 16
_MAX_SEARCH = 10**9  # characters compared; searches from the right have no better bound
_WIDE = re.compile(r"\d{5}|%[#0\- +]*\d*\.?\*")  # of a text with "%" in it
_NUMBER = re.compile(r"\d+")
_FLOAT_CHARACTERS = 310  # of the largest one
_WIDE_FIELD = re.compile(r"\d{5}|[{]")


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


def _check_product(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            size = len(value) if isinstance(value, str) else budget.weight(value)
            budget.require(size * max(count, 0))


def _check_quotient(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(max(left.bit_length(), right.bit_length()))


def _check_power(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * abs(right))


def _check_sum(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, SEQUENCES) and isinstance(right, SEQUENCES):
        budget.require(len(left) + len(right))


def _check_remainder(budget: TemplateBudget, left: Any, right: Any) -> None:
    """Checks a remainder, or a format and what it writes."""
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


OPERATORS: Mapping[str, Callable[[TemplateBudget, Any, Any], None]] = {
    "*": _check_product,
    "**": _check_power,
    "+": _check_sum,
    "//": _check_quotient,
    "%": _check_remainder,
}
NAMING = ("groupby", "map", "max", "min", "rejectattr", "selectattr", "sort", "unique")
FILTERS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(NAMING, _check_names),
    "format": _check_format,
    "indent": _check_indent,
    "join": check_join,
    "replace": check_replace,
    "round": _check_round,
    "sum": _check_total,
    "trim": check_search,
}
