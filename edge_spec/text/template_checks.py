"""Has what each operation of a chat template would take held against its budget before it is made,
by checks, and by code that counts values, comparisons and loops as it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateAssertionError
from jinja2.visitor import NodeTransformer

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
_MAX_OPERANDS = 8  # of a sum that is written at once, which is not counted
# Names that no template can spell.
STEP, MADE, COPIED, JOINED = "a step", "a value", "a copy", "a joined text"
COMPARED = "a compared value"
_SMALL = (nodes.Const, nodes.Compare, nodes.Neg, nodes.Not, nodes.Test)  # have short values


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


class Generator(CodeGenerator):
    """Leaves the sums alone that Bounding has marked."""

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        if not hasattr(node, "is_counted_elsewhere"):
            return super().visit_Add(node, frame)
        self.write("(")
        self.visit(node.left, frame)
        self.write(" + ")
        self.visit(node.right, frame)
        self.write(")")


class Bounding(NodeTransformer):
    """Has a template count what it makes and how often its loops go round."""

    def __init__(self) -> None:
        self._kept = 0  # parts around this one whose text is not written at once

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        visited = self._visit_kept(node) if node.recursive else self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_step(), node.test, lineno=node.lineno)
        return visited

    def _visit_kept(self, node: nodes.Node) -> nodes.Node:
        self._kept += 1
        self.generic_visit(node)
        self._kept -= 1
        return node

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_AssignBlock = _visit_kept  # noqa: N815
    visit_Block = _visit_kept  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        """Counts what is written at once when it is written; sums of it are counted if they are
        long."""
        if not self._kept:
            for value in node.nodes:
                sums = _sums(value)
                if len(sums) < _MAX_OPERANDS:
                    for one in sums:
                        one.is_counted_elsewhere = True  # type: ignore[attr-defined]
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load"), JOINED)

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE)

    visit_Dict = _made  # noqa: N815

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return node if _is_constant(node) else self._made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._made(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, COPIED)
        node.arg = _compared(node.arg)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Takes as long as its second value weighs, or as the first one where that is hashed."""
        constant = [_is_constant(operand.expr) for operand in node.ops]
        self.generic_visit(node)
        if not constant[0] and node.ops[0].op in ("in", "notin"):
            node.expr = _compared(node.expr)
        for operand, known in zip(node.ops, constant, strict=True):
            if not known:
                operand.expr = _compared(operand.expr)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise TemplateAssertionError("autoescape is not for prompts", node.lineno)


def _sums(node: nodes.Node) -> list[nodes.Add]:
    """The operators of a + b + c."""
    if not isinstance(node, nodes.Add):
        return []
    return [node, *_sums(node.left), *_sums(node.right)]


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _compared(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, _SMALL) else _filtered(node, COMPARED)


def _step() -> nodes.Test:
    return nodes.Test(nodes.Const(None), STEP, [], [], None, None)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
