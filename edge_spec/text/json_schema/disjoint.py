"""Finds what of one form no other form fits: what oneOf asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from edge_spec.text.json_schema.forms import Arrays, Form, Forms, Objects, Together
from edge_spec.text.json_schema.patterns import UnknownPatternError, is_found
from edge_spec.text.json_schema.scalars import Numbers, Plain, Strings

_MAX_DEPTH = 4  # of members that tell objects apart
Read = Callable[[Together], Forms]


class OverlapError(Exception):
    """It is not known what fits one form only."""


def have_own_tags(groups: Sequence[Forms], read: Read) -> bool:
    """Says whether all are objects with a member whose values are others in each group, as those of
    a discriminated union."""
    objects = [[form for form in group if isinstance(form, Objects)] for group in groups]
    if [list(group) for group in groups] != objects or not any(objects):
        return False
    shared = set.intersection(*(set(form.required) for group in objects for form in group))
    return any(_is_tag(name, objects, read) for name in shared)


def _is_tag(name: str, groups: Sequence[Sequence[Objects]], read: Read) -> bool:
    taken: set[str] = set()
    for group in groups:
        tags: set[str] = set()
        for member in (member for form in group for member in read(form.member(name))):
            if not isinstance(member, Strings) or member.values is None:
                return False
            tags |= set(member.values)
        if tags & taken:
            return False
        taken |= tags
    return True


def apart(form: Form, others: Iterable[Form], read: Read, depth: int = 0) -> list[Form]:
    """Returns forms that have what fits `form` and none of the others, or less. Raises
    OverlapError."""
    left = [form]
    for other in others:
        left = [piece for each in left for piece in _apart(each, other, read, depth)]
    return left


def _apart(form: Form, other: Form, read: Read, depth: int) -> Sequence[Form]:
    if isinstance(form, Plain) and isinstance(other, Plain):
        left = form.without(other.values)
        return [] if left is None else [left]
    if isinstance(form, Numbers) and isinstance(other, Numbers):
        return _numbers(form, other)
    if isinstance(form, Strings) and isinstance(other, Strings):
        return _strings(form, other)
    if isinstance(form, Arrays) and isinstance(other, Arrays):
        return _arrays(form, other, read, depth)
    if isinstance(form, Objects) and isinstance(other, Objects):
        return _objects(form, other, read, depth)
    return [form]


def _sound(*forms: Numbers | Strings | Arrays | None) -> list[Form]:
    return [form for form in forms if form is not None]


def _numbers(form: Numbers, other: Numbers) -> list[Form]:
    if form.meet(other) is None:
        return [form]
    if form.values is not None:
        left = tuple(v for v in form.values if not (_listed(other, v) and other.holds(v)))
        return _sound(replace(form, values=left).sound())
    if other.values is not None:
        return _sound(form.without(other.values))
    below: list[Numbers | None] = []
    if other.least is not None:
        below.append(form.meet(Numbers(below=other.least)))
    if other.above is not None:
        below.append(form.meet(Numbers(most=other.above)))
    if other.most is not None:
        below.append(form.meet(Numbers(above=other.most)))
    if other.below is not None:
        below.append(form.meet(Numbers(least=other.below)))
    if other.step is not None or (other.is_whole and not form.is_whole):
        raise OverlapError
    return _sound(*below)


def _listed(other: Numbers, value: float) -> bool:
    return other.values is None or value in other.values


def _strings(form: Strings, other: Strings) -> list[Form]:
    if form.meet(other) is None:
        return [form]
    if form.values is not None:
        return _sound(replace(form, values=_unfit(form.values, other)).sound())
    if other.values is not None:
        return _sound(form.without(other.values))
    if other.is_regular:
        raise OverlapError
    longer = None if other.max_length is None else Strings(other.max_length + 1)
    shorter = Strings(0, other.min_length - 1) if other.min_length else None
    return _sound(*(form.meet(each) for each in (shorter, longer) if each is not None))


def _unfit(values: Sequence[str], other: Strings) -> tuple[str, ...]:
    """Those of the values that surely do not fit the other form."""
    taken = None if other.values is None else set(other.values)
    return tuple(
        value
        for value in values
        if (taken is not None and value not in taken)
        or not other.has_length(value)
        or any(_lacks(pattern, value) for pattern in other.patterns)
    )


def _lacks(pattern: str, value: str) -> bool:
    try:
        return not is_found(pattern, value)
    except UnknownPatternError:
        return False


def _arrays(form: Arrays, other: Arrays, read: Read, depth: int) -> list[Form]:
    if form.meet(other) is None:
        return [form]
    for index in range(min(form.min_items, other.min_items, 16)):
        if _is_disjoint(form.item(index), other.item(index), read, depth):
            return [form]
    if other.sources or other.contained or other.is_unique:
        raise OverlapError
    longer = None if other.max_items is None else Arrays(min_items=other.max_items + 1)
    shorter = Arrays(max_items=other.min_items - 1) if other.min_items else None
    return _sound(*(form.meet(each) for each in (shorter, longer) if each is not None))


def _objects(form: Objects, other: Objects, read: Read, depth: int) -> list[Form]:
    if form.meet(other) is None:
        return [form]
    for name in other.required:
        if name not in form.known:
            return [replace(form, forbidden=form.forbidden | {name})]
    for name in form.required:
        if other.is_stated_closed and name not in other.known:
            return [form]
        is_shared = name in other.required or name in other.known
        if is_shared and _is_disjoint(form.member(name), other.member(name), read, depth):
            return [form]
    for name in other.required:
        if name not in form.required:
            return [replace(form, forbidden=form.forbidden | {name})]
    for name in other.forbidden:
        met = form.meet(Objects(required=(name,)))
        return [] if met is None else [met]
    if not (other.sources or other.min_members or other.max_members is not None or other.names):
        return []
    raise OverlapError


def _is_disjoint(parts: Together, others: Together, read: Read, depth: int) -> bool:
    """Says whether surely nothing fits both."""
    if depth == _MAX_DEPTH:
        return False
    forms = read(parts)
    try:
        return all(apart(form, read(others), read, depth + 1) == [form] for form in forms)
    except OverlapError:
        return False
