"""Writes numbers so that llguidance holds them exactly, or within."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from edge_spec.text.json_schema.document import Document, Node
from edge_spec.text.json_schema.scalars import Numbers

_EXACT = 2**53  # whole numbers up to it are floats, as which llguidance reads bounds
_GREATEST = 10**15 - 1  # of bounds, which become regular expressions of digits
_LEAST = 1e-15  # of bounds, likewise, that are not 0
_MAX_EXCLUDED = 100
_MAX_REMAINDERS = 10_000


def number_schemas(document: Document, node: Node, form: Numbers) -> list[dict[str, Any]]:
    """One schema or several, of which one has to fit."""
    if form.values is not None:
        if any(abs(value) > _EXACT or 0 < abs(value) < _LEAST for value in form.values):
            document.cannot_hold(node, "enum", "a number of more than 15 digits")
            return [{"type": "integer" if form.is_whole else "number"}]
        return [{"enum": list(form.values)}]
    pieces: list[Numbers] = [form]
    for value in dict.fromkeys(form.excluded[:_MAX_EXCLUDED]):
        sides = Numbers(below=value), Numbers(above=value)
        pieces = [met for piece in pieces for side in sides if (met := piece.meet(side))]
    if len(set(form.excluded)) > _MAX_EXCLUDED:
        document.cannot_hold(node, "not", "too many numbers")
    pieces = [piece for piece in map(_bounded, pieces) if piece is not None]
    return [_schema(document, node, piece) for piece in pieces]


def _bounded(form: Numbers) -> Numbers | None:
    """Bounds of more digits than a grammar takes are drawn inwards."""
    least, most, above, below = form.least, form.most, form.above, form.below
    if any(each is not None and abs(each) > _GREATEST for each in (least, above)):
        low = max(each for each in (least, above) if each is not None)
        if low > 0:
            return None
        least, above = -_GREATEST, None
    if any(each is not None and abs(each) > _GREATEST for each in (most, below)):
        high = min(each for each in (most, below) if each is not None)
        if high < 0:
            return None
        most, below = _GREATEST, None
    form = replace(form, least=least, most=most, above=above, below=below)
    if any(each is not None and 0 < abs(each) < _LEAST for each in (least, above)):
        low = max(each for each in (least, above) if each is not None)
        form = replace(form, least=_LEAST if low > 0 else 0, above=None) if low < _LEAST else form
    if any(each is not None and 0 < abs(each) < _LEAST for each in (most, below)):
        high = min(each for each in (most, below) if each is not None)
        form = (
            replace(form, most=0 if high > 0 else -_LEAST, below=None) if high > -_LEAST else form
        )
    return form.sound()


def _schema(document: Document, node: Node, form: Numbers) -> dict[str, Any]:
    step, is_whole = form.step, form.is_whole
    if step is not None and is_whole:
        step = Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
        step = None if step == 1 else step
    schema: dict[str, Any] = {"type": "integer" if is_whole else "number"}
    if not is_whole:
        form = _drawn_in(form)
    bounds = {
        "minimum": form.least,
        "maximum": form.most,
        "exclusiveMinimum": form.above,
        "exclusiveMaximum": form.below,
    }
    schema.update({name: bound for name, bound in bounds.items() if bound is not None})
    if step is not None:
        if _is_known(step):
            schema["multipleOf"] = float(step) if step.denominator > 1 else int(step)
        else:
            document.cannot_hold(node, "multipleOf", "it has too many digits")
    return schema


def _drawn_in(form: Numbers) -> Numbers:
    """llguidance takes a whole number for one above it where both bounds lie between it and the
    next: it is left by a millionth of what lies between."""
    lower = max((each for each in (form.least, form.above) if each is not None), default=None)
    upper = min((each for each in (form.most, form.below) if each is not None), default=None)
    if lower is None or upper is None or int(lower) != int(upper) or lower == upper:
        return form
    margin = 10.0 ** (math.floor(math.log10(upper - lower)) - 6)
    if lower == form.above and lower == int(lower):
        form = replace(form, above=None, least=lower + margin)
    if upper == form.below and upper == int(upper):
        form = replace(form, below=None, most=upper - margin)
    return form


def _is_known(step: Fraction) -> bool:
    """Says whether llguidance reads the number right, which shifts the point of a float until no
    digit comes after it, and counts remainders of what that is in reasonable time."""
    value, exponent = float(step), 0
    while value != int(value) and exponent < 20:
        value *= 10
        exponent += 1
    is_small = value <= _MAX_REMAINDERS or (value < 2**32 and str(int(value)).strip("0") == "1")
    return is_small and Fraction(int(value), 10**exponent) == step
