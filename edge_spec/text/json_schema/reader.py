"""Reads a JSON Schema into forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from edge_spec.text.json_schema.disjoint import OverlapError, apart, have_own_tags
from edge_spec.text.json_schema.document import CannotHoldError, Document, Node
from edge_spec.text.json_schema.forms import (
    EVERYTHING,
    NOTHING,
    Arrays,
    Form,
    Forms,
    Items,
    Members,
    Objects,
    Together,
    meet,
    together,
)
from edge_spec.text.json_schema.negation import FORBIDDEN, MEMBERS, WITHOUT, negated
from edge_spec.text.json_schema.scalars import Numbers, Plain, Strings, is_number
from edge_spec.text.json_schema.shapes import TYPES
from edge_spec.text.json_schema.typed import typed

MAX_FORMS = 1000
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
MAX_MEMBERS = 60  # of oneOf, which are compared each with each


class Reader:
    """Tells what forms parts of a schema have. Each part is read once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._read: dict[int, Forms] = {}
        self._reading: set[int] = set()

    def forms(self, parts: Together) -> Forms:
        """What fits all of the parts."""
        found: Sequence[Form] = EVERYTHING
        for part in parts:
            found = self._both(part, found, self._forms(part))
        return tuple(found)

    def _both(self, node: Node, forms: Sequence[Form], others: Sequence[Form]) -> Forms:
        if len(forms) * len(others) > MAX_FORMS * len(EVERYTHING):
            self._document.wrong(node.path, f"more than {MAX_FORMS} combinations")
        return meet(forms, others)

    def _forms(self, node: Node) -> Forms:
        key = id(node.schema)
        if key in self._read and not isinstance(node.schema, bool):
            return self._read[key]
        if key in self._reading and not isinstance(node.schema, bool):
            self._document.wrong(node.path, "a schema that is itself without end")
        self._reading.add(key)
        try:
            forms = self._read[key] = self._forms_of(node, self._document.given(node))
        finally:
            self._reading.discard(key)
        return forms

    def _forms_of(self, node: Node, given: dict[Any, Any]) -> Forms:
        if node.schema is False:
            return ()
        forms = typed(self._document, node)
        if given.get("nullable") is True:
            forms = (*forms, *([] if "enum" in given else [Plain((None,))]))
        for keyword, read in self._applied.items():
            if keyword in given:
                also = read(self, node)
                forms = self._both(node, forms, self._or_null(given, keyword, also))
        if WITHOUT in given:
            left = [form for form in forms if not isinstance(form, (Arrays, Objects))]
            rest = [form for form in forms if isinstance(form, (Arrays, Objects))]
            without = [form.without(given[WITHOUT]) for form in left]
            forms = (*[form for form in without if form is not None], *rest)
        if "oneOf" in given:
            forms = self._one(node, forms)
        if "unevaluatedProperties" in given:
            others = together([self._document.child(node, "unevaluatedProperties")])
            forms = tuple(
                form.with_others(others) if isinstance(form, Objects) else form for form in forms
            )
        return forms

    @staticmethod
    def _or_null(given: dict[Any, Any], keyword: str, forms: Forms) -> Forms:
        """OpenAPI's nullable is meant of what stands beside it, references included."""
        is_meant = given.get("nullable") is True and keyword in ("$ref", "allOf", "anyOf")
        return (*forms, Plain((None,))) if is_meant else forms

    # Keywords that bring schemas to fit as well.

    def _reference(self, node: Node) -> Forms:
        return self._forms(self._document.target(node))

    def _all(self, node: Node) -> Forms:
        return self.forms(together(self._document.children(node, "allOf")))

    def _any(self, node: Node) -> Forms:
        members = self._document.children(node, "anyOf")
        found: list[Form] = []
        faults: list[CannotHoldError] = []
        for member in members:
            try:
                found += self._member(node, member)
            except CannotHoldError as error:
                faults.append(error)
        if faults and not found:
            raise faults[0]
        for fault in faults:
            self._document.pass_over(node, "anyOf", f"one is never chosen: {fault}")
        return tuple(found)

    def _member(self, node: Node, member: Node) -> Forms:
        """Of a union. A discriminator's property has to be there, with a value of this member."""
        forms = self._forms(member)
        told = node.schema.get("discriminator")
        name = told.get("propertyName") if isinstance(told, dict) else None
        if not isinstance(name, str):
            return forms
        tags = [tag for tag, ref in _mapping(told).items() if ref == _ref_of(member)]
        tag = {name: {"enum": tags}} if tags else {}
        tagged = {"type": "object", "required": [name], MEMBERS: tag}
        return self.forms((member, self._document.made(member, ("tag", name), lambda: tagged)))

    def _one(self, node: Node, forms: Forms) -> Forms:
        """oneOf: what fits one member may fit no other one."""
        members = self._document.children(node, "oneOf")
        groups = [self._both(node, forms, self._member(node, member)) for member in members]
        if have_own_tags(groups, self.forms):
            return tuple(form for group in groups for form in group)
        found: list[Form] = []
        try:
            if len(groups) > MAX_MEMBERS:
                raise OverlapError
            for index, group in enumerate(groups):
                others = [form for n, each in enumerate(groups) if n != index for form in each]
                for form in group:
                    found += apart(form, others, self.forms)
        except OverlapError:
            why = "a value may fit two members; anyOf allows it"
            self._document.cannot_hold(node, "oneOf", why)
            return tuple(form for group in groups for form in group)
        return tuple(found)

    def _const(self, node: Node) -> Forms:
        return (self._value(self._document.child(node, "const")),)

    def _enum(self, node: Node) -> Forms:
        values = self._document.given(node)["enum"]
        path = f"{node.path}/enum"
        texts = self._writable(node, [value for value in values if isinstance(value, str)])
        numbers = tuple(dict.fromkeys(self._number(path, v) for v in values if is_number(v)))
        found: list[Form] = [Strings(values=texts)] if texts else []
        found += [Numbers(values=numbers)] if numbers else []
        for index, value in enumerate(values):
            if not isinstance(value, str) and not is_number(value):
                found.append(self._value(self._document.child(node, "enum", index)))
        return tuple(found)

    def _writable(self, node: Node, texts: list[str]) -> tuple[str, ...]:
        """Leaves out what needs an escape that answers do not have."""
        kept = tuple(text for text in dict.fromkeys(texts) if not _UNWRITTEN.search(text))
        if len(kept) < len(set(texts)):
            self._document.pass_over(node, "enum", "a control character is never written")
        return kept

    def _value(self, node: Node) -> Form:
        """The form of one value, which `node` has where others have a schema."""
        value = node.schema
        if value is None or isinstance(value, bool):
            return Plain((value,))
        if isinstance(value, str):
            return Strings(values=self._writable(node, [value]))
        if isinstance(value, list):
            items = [self._constant(node, index) for index in range(len(value))]
            return Arrays((Items(tuple(items), NOTHING),), len(value), len(value))
        if isinstance(value, dict):
            members = {str(name): self._constant(node, name) for name in value}
            return Objects((Members(members, {}, NOTHING),), tuple(members))
        return Numbers(values=(self._number(node.path, value),))

    def _number(self, path: str, value: Any) -> float | int:
        if not is_number(value):
            self._document.wrong(path, "a value that is no JSON")
        return value  # type: ignore[no-any-return]

    def _constant(self, node: Node, step: str | int) -> Together:
        child = self._document.child(node, step)
        return (self._document.made(node, ("const", step), lambda: {"const": child.schema}),)

    def _not(self, node: Node) -> Forms:
        return self._negative(node, "not")

    def _negative(self, node: Node, keyword: str) -> Forms:
        inner = self._document.child(node, keyword)
        make = lambda: negated(self._document, inner)  # noqa: E731
        choices = self._document.made(node, ("not", keyword), make)
        if choices.schema is None:
            self._document.cannot_hold(node, keyword, "what does not fit this is not known")
            return EVERYTHING
        found: list[Form] = []
        for index in range(len(choices.schema)):
            found += self._forms(Node(choices.schema[index], inner.path))
        return tuple(form.unnamed() if isinstance(form, Objects) else form for form in found)

    def _if(self, node: Node) -> Forms:
        given = self._document.given(node)
        if "then" not in given and "else" not in given:
            return EVERYTHING
        both = [self._document.child(node, name) for name in ("if", "then") if name in given]
        found = [*self.forms(together(both))]
        if given.get("else") is False:
            return tuple(found)
        others = self._negative(node, "if")
        if "else" in given:
            others = self._both(node, others, self._forms(self._document.child(node, "else")))
        return (*found, *others)

    def _dependent(self, node: Node) -> Forms:
        given = self._document.given(node)
        forms: Forms = EVERYTHING
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in given.get(keyword, {}).items():
                without = {"type": "object", FORBIDDEN: (name,)}
                others = {"type": [each for each in TYPES if each != "object"]}
                asked = {"type": "object", "required": [name]}
                if isinstance(needed, list):
                    asked["required"] = [name, *needed]
                    needed = True
                made = [without, others, {"allOf": [asked, needed]}]
                union = self._document.made(node, (keyword, name), lambda m=made: {"anyOf": m})  # type: ignore[misc]
                forms = self._both(node, forms, self._forms(union))
        return forms

    _applied: ClassVar[dict[str, Callable[[Reader, Node], Forms]]] = {
        "$ref": _reference,
        "allOf": _all,
        "anyOf": _any,
        "const": _const,
        "enum": _enum,
        "not": _not,
        "if": _if,
        "dependentRequired": _dependent,
        "dependentSchemas": _dependent,
        "dependencies": _dependent,
    }


def _mapping(told: dict[str, Any]) -> dict[str, Any]:
    mapping = told.get("mapping")
    return mapping if isinstance(mapping, dict) else {}


def _ref_of(member: Node) -> object:
    return member.schema.get("$ref") if isinstance(member.schema, dict) else None
