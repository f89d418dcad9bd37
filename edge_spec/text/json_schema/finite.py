"""Takes out of a schema what no finite value fits, such as a node that always has another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def pruned(root: Any, definitions: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the whole schema; None if nothing fits it."""
    finite: set[str] = set()
    while more := {n for n, each in definitions.items() if n not in finite and _is(each, finite)}:
        finite |= more
    if not _is(root, finite):
        return None
    kept = {name: _without(definitions[name], finite) for name in definitions if name in finite}
    schema = _without(root, finite)
    whole: dict[str, Any] = {} if schema is True else schema
    return {**whole, "$defs": kept} if kept else whole


def _is(schema: Any, finite: set[str]) -> bool:
    """Says whether some value fits the schema, where definitions in `finite` have one each."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return _name(schema) in finite
    if "anyOf" in schema:
        return any(_is(each, finite) for each in schema["anyOf"])
    if schema.get("type") == "object":
        members = schema["properties"]
        others = schema["additionalProperties"]
        if schema.get("minProperties", 0) > len(schema.get("required", ())) and not (
            _is(others, finite)
            or any(_is(each, finite) for each in schema.get("patternProperties", {}).values())
        ):
            return False
        return all(_is(members.get(name, others), finite) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        needed = [*first, rest][: schema.get("minItems", 0)]
        return all(_is(each, finite) for each in needed)
    return True


def _without(schema: Any, finite: set[str]) -> Any:
    """The schema, in which what is not finite is false."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema if _name(schema) in finite else False
    if "anyOf" in schema:
        left = [_without(each, finite) for each in schema["anyOf"] if _is(each, finite)]
        return left[0] if len(left) == 1 else {"anyOf": left}
    found = dict(schema)
    for keyword in ("properties", "patternProperties"):
        if keyword in schema:
            found[keyword] = {n: _without(each, finite) for n, each in schema[keyword].items()}
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            found[keyword] = _without(schema[keyword], finite)
    if "prefixItems" in schema:
        found["prefixItems"] = [_without(each, finite) for each in schema["prefixItems"]]
    return found


def num_levels(schema: Mapping[str, Any]) -> int:
    """Counts how many definitions are read within each other, by who reads each where it is
    mentioned first."""
    definitions, seen = schema.get("$defs", {}), set()
    levels = [_references({name: part for name, part in schema.items() if name != "$defs"})]
    most = 0
    while levels:
        name = next((each for each in levels[-1] if each not in seen), None)
        if name is None:
            levels.pop()
            continue
        seen.add(name)
        levels.append(_references(definitions[name]))
        most = max(most, len(levels))
    return most


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):  # else it is a member of that name
            yield _name(schema)
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _name(reference: Mapping[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]
