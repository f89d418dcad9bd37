"""What a value may be that has no parts: null, truth values, numbers and strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Plain:
    """null, true and false."""

    values: tuple[bool | None, ...]

    def meet(self, other: Plain) -> Plain | None:
        values = tuple(value for value in self.values if value in other.values)
        return Plain(values) if values else None

    def without(self, values: Sequence[Any]) -> Plain | None:
        """Returns None where nothing is left."""
        left = tuple(v for v in self.values if not any(v is other for other in values))
        return Plain(left) if left else None


@dataclass(frozen=True)
class Numbers:
    """values: those that there are; None: all within the bounds. step: they are multiples of it."""

    is_whole: bool = False
    least: float | int | None = None
    most: float | int | None = None
    above: float | int | None = None
    below: float | int | None = None
    step: Fraction | None = None
    values: tuple[float | int, ...] | None = None
    excluded: tuple[float | int, ...] = ()

    def meet(self, other: Numbers) -> Numbers | None:
        return Numbers(
            self.is_whole or other.is_whole,
            most_of(self.least, other.least),
            least_of(self.most, other.most),
            most_of(self.above, other.above),
            least_of(self.below, other.below),
            _multiple_of_both(self.step, other.step),
            common(self.values, other.values),
            self.excluded + other.excluded,
        ).sound()

    def without(self, values: Sequence[Any]) -> Numbers | None:
        return replace(self, excluded=(*self.excluded, *filter(is_number, values))).sound()

    def sound(self) -> Numbers | None:
        """Itself, with bounds as whole numbers have them; None where no number fits."""
        form = self
        if self.values is not None:
            values = tuple(value for value in self.values if self.holds(value))
            return replace(self, values=values) if values else None
        if self.is_whole:
            form = self._whole_bounds()
        low = most_of(form.least, form.above)
        high = least_of(form.most, form.below)
        if low is None or high is None:
            return form
        if low > high or (low == high and low in (form.above, form.below)):
            return None
        if form.step is not None and not form.has_multiple(low, high):
            return None
        return form

    def _whole_bounds(self) -> Numbers:
        lows = [] if self.least is None else [math.ceil(self.least)]
        highs = [] if self.most is None else [math.floor(self.most)]
        lows += [] if self.above is None else [math.floor(self.above) + 1]
        highs += [] if self.below is None else [math.ceil(self.below) - 1]
        least, most = max(lows, default=None), min(highs, default=None)
        return replace(self, least=least, most=most, above=None, below=None)

    def has_multiple(self, low: float, high: float) -> bool:
        assert self.step is not None
        first = math.ceil(Fraction(low) / self.step) * self.step
        if first == self.above:
            first += self.step
        return first <= high and not (self.below is not None and first >= self.below)

    def holds(self, value: float) -> bool:
        """Says whether a number fits all but `values`."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and not (self.is_whole and value != int(value))
            and (self.step is None or (exact(value) / self.step).denominator == 1)
            and value not in self.excluded
        )


@dataclass(frozen=True)
class Strings:
    """patterns: regular expressions, each found somewhere. formats: names of llguidance's."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()

    def meet(self, other: Strings) -> Strings | None:
        return Strings(
            max(self.min_length, other.min_length),
            least_of(self.max_length, other.max_length),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.formats + other.formats)),
            common(self.values, other.values),
            self.excluded + other.excluded,
        ).sound()

    def without(self, values: Sequence[Any]) -> Strings | None:
        texts = [value for value in values if isinstance(value, str)]
        return replace(self, excluded=(*self.excluded, *texts)).sound()

    def sound(self) -> Strings | None:
        """None where no string fits, as far as lengths tell."""
        if self.max_length is not None and self.min_length > self.max_length:
            return None
        if self.values is None:
            return self
        excluded = set(self.excluded)
        values = tuple(v for v in self.values if self.has_length(v) and v not in excluded)
        return replace(self, values=values) if values else None

    def has_length(self, value: str) -> bool:
        return self.min_length <= len(value) and (
            self.max_length is None or len(value) <= self.max_length
        )

    @property
    def is_regular(self) -> bool:
        """Says whether more than a length is asked of the string."""
        return bool(self.patterns or self.formats)


def is_number(value: object) -> bool:
    """Says whether JSON has such a number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def exact(value: float) -> Fraction:
    """A number as it is written, so that 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def most_of(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else max(a, b)


def least_of(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else min(a, b)


def common(values: Any, others: Any) -> Any:
    if values is None or others is None:
        return others if values is None else values
    kept = set(others)
    return tuple(value for value in values if value in kept)


def _multiple_of_both(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return b if a is None else a
    shared = a.denominator * b.denominator
    left, right = int(a * shared), int(b * shared)
    return Fraction(math.lcm(left, right), shared)
