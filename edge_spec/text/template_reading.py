"""Reads in a chat template what it may do with the texts that it is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import nodes

# What these give of a text is the text, a part of it without a gap, or no text of it.
_KEEPING = (
    *("append", "attr", "count", "d", "default", "dictsort", "endswith", "extend", "find", "first"),
    *("float", "get", "index", "insert", "int", "items", "join", "keys", "last", "length", "list"),
    *("map", "max", "min", "pop", "reject", "rejectattr", "safe", "select", "selectattr", "sort"),
    *("startswith", "string", "sum", "tojson", "trim", "unique", "update", "values"),
)
_CUTTING = ("split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix")
_STRIPPING = ("strip", "lstrip", "rstrip")


@dataclass(frozen=True)
class TemplateReading:
    """literals: texts in the template, in its expressions and between them. cuts: those at which it
    may take a text apart. rewrites: whether it may change a text in other ways."""

    literals: tuple[str, ...]
    cuts: frozenset[str]
    rewrites: bool

    @classmethod
    def of(cls, source: str) -> TemplateReading:
        """source: of a template that compiles."""
        from jinja2 import nodes

        from edge_spec.text.template_sandbox import TemplateSandbox

        tree = TemplateSandbox().parse(source)
        constants = [each.value for each in tree.find_all(nodes.Const)]
        data = [each.data for each in tree.find_all(nodes.TemplateData)]
        steps = list(_steps(tree))
        return cls(
            literals=tuple(text for text in [*constants, *data] if isinstance(text, str)),
            cuts=frozenset(cut for cut in steps if cut is not None),
            rewrites=None in steps,
        )


def _steps(tree: nodes.Template) -> Iterator[str | None]:
    """Yields the text at which each step cuts, None for one that may do anything else."""
    from jinja2 import nodes

    steps: list[nodes.Call | nodes.Filter] = [
        *tree.find_all(nodes.Call),
        *tree.find_all(nodes.Filter),
    ]
    for each in steps:
        name, first = _name(each), each.args[0] if each.args else None
        text = first.value if isinstance(first, nodes.Const) else None
        if name == "map" and first is not None:  # by the filter of this name
            yield from () if text in _KEEPING else (None,)
        elif name in _CUTTING:
            yield text
        elif name == "splitlines":
            yield "\n"
        elif name in _STRIPPING:
            if first is not None and (text is None or text.strip()):
                yield None
        elif name not in _KEEPING and name is not None:
            yield None
    if any(each.step is not None for each in tree.find_all(nodes.Slice)):
        yield None


def _name(step: nodes.Call | nodes.Filter) -> str | None:
    """Returns None for a macro of the template's own, whose steps are found in it."""
    from jinja2 import nodes

    if isinstance(step, nodes.Filter):
        return step.name
    called = step.node
    return called.attr if isinstance(called, nodes.Getattr) else None
