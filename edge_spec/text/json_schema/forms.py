"""What a value may be, one form for each kind of value. A schema is several forms, of which one has
to fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from edge_spec.text.json_schema.document import Node

# Parts of a schema that have to fit all together; () is anything.
Together = tuple[Node, ...]
NOTHING: Together = (Node(False, ""),)


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
            _most_of(self.least, other.least),
            _least_of(self.most, other.most),
            _most_of(self.above, other.above),
            _least_of(self.below, other.below),
            _multiple_of_both(self.step, other.step),
            _common(self.values, other.values),
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
        low = _most_of(form.least, form.above)
        high = _least_of(form.most, form.below)
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
            _least_of(self.max_length, other.max_length),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.formats + other.formats)),
            _common(self.values, other.values),
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


@dataclass(frozen=True)
class Items:
    """What one schema says of an array: of the first ones each, and of all after these."""

    first: tuple[Together, ...] = ()
    rest: Together = ()


@dataclass(frozen=True)
class Arrays:
    """contained: parts that so many items fit."""

    sources: tuple[Items, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False
    contained: tuple[tuple[Node, int], ...] = ()

    def meet(self, other: Arrays) -> Arrays | None:
        most = _least_of(self.max_items, other.max_items)
        least = max(self.min_items, other.min_items)
        if most is not None and least > most:
            return None
        return Arrays(
            self.sources + other.sources,
            least,
            most,
            self.is_unique or other.is_unique,
            self.contained + other.contained,
        )

    def item(self, index: int) -> Together:
        """All that is said of the item at `index`."""
        parts: list[Node] = []
        for source in self.sources:
            parts += source.first[index] if index < len(source.first) else source.rest
        return together(parts)

    @property
    def num_first(self) -> int:
        return max((len(source.first) for source in self.sources), default=0)


@dataclass(frozen=True)
class Members:
    """What one schema says of an object. others: of members that it does not name; None: nothing.
    is_naming: the schema lists what members there are, and not only what some are like."""

    properties: Mapping[str, Together] = field(default_factory=dict)
    patterns: Mapping[str, Together] = field(default_factory=dict)
    others: Together | None = None
    is_naming: bool = False


@dataclass(frozen=True)
class Objects:
    """forbidden: members that there may not be. names: what names have to fit."""

    sources: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    min_members: int = 0
    max_members: int | None = None
    names: Together = ()
    forbidden: frozenset[str] = frozenset()

    def meet(self, other: Objects) -> Objects | None:
        most = _least_of(self.max_members, other.max_members)
        required = tuple(dict.fromkeys(self.required + other.required))
        least = max(self.min_members, other.min_members)
        forbidden = self.forbidden | other.forbidden
        if most is not None and max(least, len(required)) > most:
            return None
        if not forbidden.isdisjoint(required):
            return None
        return Objects(
            self.sources + other.sources,
            required,
            least,
            most,
            together(self.names + other.names),
            forbidden,
        )

    @property
    def known(self) -> tuple[str, ...]:
        """Names of members that are spoken of, in order."""
        named = dict.fromkeys(name for source in self.sources for name in source.properties)
        return tuple(dict.fromkeys([*named, *self.required]))

    def member(self, name: str) -> Together:
        """All that is said of the member of that name."""
        if name in self.forbidden:
            return NOTHING
        parts: list[Node] = []
        for source in self.sources:
            found = [source.properties[name]] if name in source.properties else []
            found += [each for pattern, each in source.patterns.items() if re.search(pattern, name)]
            if not found and source.others is not None:
                found = [source.others]
            parts += [part for each in found for part in each]
        return together(parts)

    def with_others(self, others: Together) -> Objects:
        """The form, where members that nothing speaks of fit `others`."""
        stated = [source for source in self.sources if source.others is not None]
        if any(source.is_naming for source in stated):
            return self
        others = together((*others, *(part for each in stated for part in each.others or ())))
        patterns: dict[str, Together] = {}
        for source in self.sources:
            for pattern, parts in source.patterns.items():
                patterns[pattern] = together((*patterns.get(pattern, ()), *parts))
        named = {name for source in self.sources if source.is_naming for name in source.properties}
        members = {
            name: self.member(name) if name in named else together((*self.member(name), *others))
            for name in dict.fromkeys(name for each in self.sources for name in each.properties)
        }
        return replace(self, sources=(Members(members, patterns, others, True),))

    @property
    def is_stated_closed(self) -> bool:
        """Says whether a schema itself allows no members but those it names one by one."""
        return any(source.others == NOTHING and not source.patterns for source in self.sources)

    @property
    def has_patterns(self) -> bool:
        return any(source.patterns for source in self.sources)

    @property
    def others(self) -> Together:
        """What members are that nothing speaks of. Schemas that name members, one by one or by
        patterns, mean these alone, unless one says what others are like."""
        stated = [source.others for source in self.sources if source.others is not None]
        is_naming = any(source.is_naming for source in self.sources)
        if is_naming and not stated and not self.names and self.min_members <= len(self.known):
            return NOTHING
        return together(part for parts in stated for part in parts)

    @property
    def is_closed(self) -> bool:
        """Says whether there are no members but the known ones."""
        return self.others == NOTHING and not self.has_patterns


Form = Plain | Numbers | Strings | Arrays | Objects
Forms = tuple[Form, ...]
EVERYTHING: Forms = (
    Plain((None,)),
    Plain((True, False)),
    Numbers(),
    Strings(),
    Arrays(),
    Objects(),
)


def meet(forms: Iterable[Form], others: Sequence[Form]) -> Forms:
    """What fits one of the forms and one of the others."""
    both: list[Form] = []
    for form in forms:
        for other in others:
            if type(form) is type(other):
                met = form.meet(other)  # type: ignore[arg-type]
                if met is not None:
                    both.append(met)
    return tuple(both)


def together(parts: Iterable[Node]) -> Together:
    """Each part once; what is anything is left out."""
    found = {id(part.schema): part for part in parts if part.schema is not True}
    if any(part.schema is False for part in found.values()):
        return NOTHING
    return tuple(found.values())


def is_number(value: object) -> bool:
    """Says whether JSON has such a number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def exact(value: float) -> Fraction:
    """A number as it is written, so that 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _most_of(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else max(a, b)


def _least_of(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else min(a, b)


def _common(values: Any, others: Any) -> Any:
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
