"""A chat template's code as it runs: with what counts its values, comparisons and loops."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateAssertionError
from jinja2.visitor import NodeTransformer

_MAX_OPERANDS = 8  # of a sum that is written at once, which is not counted
# Names that no template can spell.
STEP, MADE, COPIED, JOINED = "a step", "a value", "a copy", "a joined text"
COMPARED = "a compared value"
_SMALL = (nodes.Const, nodes.Compare, nodes.Neg, nodes.Not, nodes.Test)  # have short values


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
