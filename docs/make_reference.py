"""Writes docs/reference.md from the docstrings of edge_spec's public names.

    python docs/make_reference.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import edge_spec

PAGE = Path(__file__).with_name("reference.md")
HEAD = """\
# Python reference

Everything that `import edge_spec` offers, made from the docstrings by `docs/make_reference.py`. How
the parts play together: [sdk.md](sdk.md). Errors are all `edge_spec.EdgeSpecError`s of
`edge_spec.errors`; their text says what, where and the remedy.
"""


def reference() -> str:
    return "\n".join([HEAD, *(part for name in edge_spec.__all__ for part in _described(name))])


def _described(name: str) -> Iterator[str]:
    value = getattr(edge_spec, name)
    yield f"## {name}\n"
    if inspect.isclass(value):
        yield from _class(value)
    else:
        yield _code(f"{'async ' if inspect.iscoroutinefunction(value) else ''}{_signature(value)}")
        yield _text(value)


def _class(kind: type) -> Iterator[str]:
    tree = ast.parse(dedent(inspect.getsource(kind)))
    lines = dedent(inspect.getsource(kind)).splitlines()
    body = tree.body[0].body  # type: ignore[attr-defined]
    fields = [
        line
        for node in body
        if isinstance(node, ast.AnnAssign | ast.Assign) and not _private(node)
        for line in lines[node.lineno - 1 : node.end_lineno]
    ]
    if kind.__doc__ and (not is_dataclass(kind) or not kind.__doc__.startswith(kind.__name__)):
        yield _text(kind)
    if fields:
        yield _code(dedent("\n".join(fields)))
    for name, member in vars(kind).items():
        described = member.fget if isinstance(member, property) else member
        described = getattr(described, "__func__", described)
        if name.startswith("_") or not inspect.isfunction(described) or not described.__doc__:
            continue
        title = f"`{kind.__name__}.{name}`" + (
            " (property)" if isinstance(member, property) else ""
        )
        yield f"### {title}\n"
        yield _code(_signature(described))
        yield _text(described)


def _private(node: ast.AnnAssign | ast.Assign) -> bool:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return isinstance(target, ast.Name) and target.id.startswith("_")


def _signature(function: Any) -> str:
    source = dedent(inspect.getsource(inspect.unwrap(function)))
    node = next(
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    node.body, node.decorator_list, node.name = [ast.Pass()], [], function.__name__
    return ast.unparse(node).removesuffix("\n    pass").removesuffix(":")


def _text(described: Any) -> str:
    return inspect.cleandoc(described.__doc__ or "").strip() + "\n"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
