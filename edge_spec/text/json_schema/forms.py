"""What a value may be, one form for each kind of value. A schema is several forms, of which one has
to fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_spec.text.json_schema.document import Node
from edge_spec.text.json_schema.patterns import is_found
from edge_spec.text.json_schema.scalars import Numbers, Plain, Strings, least_of

# Parts of a schema that have to fit all together; () is anything.
Together = tuple[Node, ...]
NOTHING: Together = (Node(False, ""),)


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
        most = least_of(self.max_items, other.max_items)
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
        most = least_of(self.max_members, other.max_members)
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
            found += [each for pattern, each in source.patterns.items() if is_found(pattern, name)]
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

    def unnamed(self) -> Objects:
        """The form, whose members are of a schema that only says what others are not like."""
        return replace(self, sources=tuple(replace(s, is_naming=False) for s in self.sources))

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
