"""A JSON Schema as somebody wrote it: its parts with their places, its references, and what of it
an answer is not held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from edge_spec.errors import UsageError
from edge_spec.text.json_schema.shapes import fault, meant


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They say nothing about a value, or belong to another keyword.
ANNOTATIONS = _words(
    "$anchor $comment $defs $dynamicAnchor $id $recursiveAnchor $schema $vocabulary definitions "
    "default deprecated description discriminator example examples externalDocs id minContains "
    "markdownDescription readOnly strict title writeOnly xml"
)
KEYWORDS = _words(
    "$dynamicRef $recursiveRef $ref additionalItems additionalProperties allOf anyOf const "
    "contains dependencies dependentRequired dependentSchemas else enum exclusiveMaximum "
    "exclusiveMinimum format if items maxContains maxItems maxLength maxProperties maximum "
    "minItems minLength minProperties minimum multipleOf not nullable oneOf pattern "
    "patternProperties prefixItems properties propertyNames required then type unevaluatedItems "
    "unevaluatedProperties uniqueItems"
)
MAX_DEPTH = 64  # of a schema's text; llguidance reads it recursively
MAX_PLACES = 20_000  # parts of a schema


class Node(NamedTuple):
    """A part of a schema, and where it stands."""

    schema: Any  # a mapping or a bool
    path: str


class CannotHoldError(Exception):
    """A keyword that answers cannot be held to, where that may not be passed over."""


class Document:
    """A whole schema. Whatever is no JSON Schema raises UsageError with its place."""

    def __init__(self, schema: Any, *, is_strict: bool, name: str) -> None:
        """name: what the schema belongs to, as messages say it."""
        self.root = Node(schema, "")
        self.is_strict = is_strict
        self.passed_over: dict[str, None] = {}
        self._name = name
        # With the whole schema they keep alive whatever parts are told apart by the ids of.
        self._made: dict[tuple[int, object], Node] = {}
        self._given: dict[int, dict[Any, Any]] = {}
        # Schemas with an address of their own, the innermost first, and what anchors name in each.
        self._resources: list[tuple[str, Node]] = []
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: list[str] = []
        self._look_through()
        self._resources.sort(key=lambda each: len(each[1].path), reverse=True)

    def wrong(self, path: str, why: str) -> NoReturn:
        raise UsageError(
            f"no answer can have this form: {why} at {self._name}{path}",
            remedy="Correct the schema.",
        )

    def cannot_hold(self, node: Node, keyword: str, why: str) -> None:
        """Passes a keyword over where the schema is not strict. Raises CannotHoldError else."""
        told = f"{keyword} at {node.path or '/'} ({why})"
        if self.is_strict:
            raise CannotHoldError(told)
        self.pass_over(node, keyword, why)

    def pass_over(self, node: Node, keyword: str, why: str) -> None:
        self.passed_over.setdefault(f"{keyword} at {node.path or '/'} ({why})")

    def given(self, node: Node) -> dict[Any, Any]:
        """The keywords of a part that say something about a value. One of null is none: programs
        write so what was not set."""
        if isinstance(node.schema, bool):
            return {} if node.schema else {"not": {}}
        if not isinstance(node.schema, Mapping):
            self.wrong(
                node.path, f"a schema is an object or a truth value, not {_kind(node.schema)}"
            )
        known = self._given.get(id(node.schema))
        if known is None:
            known = self._given[id(node.schema)] = self._read(node)
        return known

    def _read(self, node: Node) -> dict[Any, Any]:
        given: dict[Any, Any] = {}
        for keyword, value in node.schema.items():
            if keyword in ANNOTATIONS or (value is None and keyword != "const"):
                continue
            if keyword == "required" and isinstance(value, bool):  # draft 3, beside a property
                self.pass_over(node, keyword, "it is a list of names")
            elif keyword in KEYWORDS or not isinstance(keyword, str):
                value = meant(keyword, value)
                told = fault(keyword, value)
                if told is None:
                    given[keyword] = value
                else:
                    self._malformed(node, keyword, told)
            elif not keyword.startswith(("x-", "content")):
                self.pass_over(node, keyword, "no keyword of JSON Schema")
            elif keyword == "contentSchema" or value == "application/json":
                self.pass_over(node, keyword, "the text in the string is free")
        for other in ("$recursiveRef", "$dynamicRef"):
            if other in given:
                ref = given.pop(other)
                if self._dynamic.count(str(ref).rpartition("#")[2]) > 1:
                    self.cannot_hold(node, other, "there are several anchors of this name")
                else:
                    given.setdefault("$ref", ref)
        return given

    def _malformed(self, node: Node, keyword: str, why: str) -> None:
        if self.is_strict:
            self.wrong(f"{node.path}/{keyword}", why)
        self.pass_over(node, keyword, why)

    def child(self, node: Node, *steps: str | int) -> Node:
        value = node.schema
        for step in steps:
            value = value[step]
        place = "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)
        return Node(value, node.path + place)

    def children(self, node: Node, keyword: str) -> list[Node]:
        """Of a keyword that has a list of schemas."""
        value = self.given(node)[keyword]
        return [self.child(node, keyword, index) for index in range(len(value))]

    def named(self, node: Node, keyword: str) -> dict[str, Node]:
        """Of a keyword that has schemas by names."""
        names = list(self.given(node).get(keyword, {}))
        return {str(name): self.child(node, keyword, name) for name in names}

    def made(self, node: Node, key: object, make: Callable[[], Any]) -> Node:
        """A part that stands for a keyword of `node`. It is the same one each time, as parts are
        told from each other by which object they are."""
        place = id(node.schema), key
        if place not in self._made:
            self._made[place] = Node(make(), node.path)
        return self._made[place]

    def target(self, node: Node) -> Node:
        """What the reference of a part stands for: anything, if it is not there."""
        ref = self.given(node)["$ref"]
        found = self._find(self._base_of(node.path), ref)
        if found is None:
            self._malformed(node, "$ref", f"{ref[:100]!r} is not in the schema")
            return Node(True, node.path)
        return found

    def _base_of(self, path: str) -> str:
        inside = (url for url, node in self._resources if f"{path}/".startswith(f"{node.path}/"))
        return next(inside, "")

    def _find(self, base: str, ref: str) -> Node | None:
        # urljoin knows no urn: addresses.
        url, fragment = urldefrag(base + ref if ref.startswith("#") else urljoin(base, ref))
        start = next((node for each, node in self._resources if each == url), None)
        if start is not None and fragment.startswith("/"):
            return self._pointed(start, fragment)
        return start if not fragment else self._anchors.get((url, unquote(fragment)))

    def _pointed(self, start: Node, pointer: str) -> Node | None:
        found = start
        for step in pointer[1:].split("/"):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                key = int(name) if isinstance(found.schema, list) else name
                found = self.child(found, key)
            except (LookupError, TypeError, ValueError):
                return None
        return found

    def _look_through(self) -> None:
        """Finds anchors and addresses, and refuses what is too large or too deep."""
        waiting: list[tuple[Node, str, int]] = [(self.root, "", 0)]
        num_places = 0
        while waiting:
            node, base, depth = waiting.pop()
            if depth > 2 * MAX_DEPTH:  # a keyword and a name are two steps
                self.wrong("", f"more than {MAX_DEPTH} levels")
            base = self._place(node, base)
            for step, value in _steps(node.schema):
                if isinstance(value, (Mapping, list)):
                    num_places += 1
                    waiting.append((self.child(node, step), base, depth + 1))
            if num_places > MAX_PLACES:
                self.wrong("", f"more than {MAX_PLACES} parts")

    def _place(self, node: Node, base: str) -> str:
        """Returns the address within which the references of a part are meant."""
        given = node.schema if isinstance(node.schema, Mapping) else {}
        for name in ("$id", "id"):
            if isinstance(given.get(name), str):
                url, anchor = urldefrag(urljoin(base, given[name]))
                if anchor:  # before draft 2019-09
                    self._anchors[url, anchor] = node
                elif url != base:
                    self._resources.append((url, node))
                    base = url
        if not node.path and not self._resources:
            self._resources.append(("", node))
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(given.get(name), str):
                self._anchors[base, given[name]] = node
        if isinstance(given.get("$dynamicAnchor"), str):
            self._dynamic.append(given["$dynamicAnchor"])
        return base


def _steps(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", type(None): "null"}
    return names.get(type(value), "a number")
