"""Docstrings of this project as mkdocstrings shows them: an extension of its parser.

Fields of a class stand in one block as in the source, with their comments, which the parser drops;
lines `name: text` about arguments become a list. `load` is shown as it is at run time, with the
arguments that the declaration of options makes.
"""

from __future__ import annotations

import inspect
import re
from textwrap import dedent
from typing import Any

import griffe

import edge_spec

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ")


class SiteDocstrings(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        fields = [
            member
            for member in cls.members.values()
            if isinstance(member, griffe.Attribute) and "property" not in member.labels
        ]
        lines = [line for field in fields for line in _source(cls, field)]
        for field in fields:
            cls.del_member(field.name)
        if lines:
            said = cls.docstring.value if cls.docstring else ""
            block = "\n".join(["```python", *lines, "```"])
            cls.docstring = griffe.Docstring(f"{said}\n\n{block}".strip(), parent=cls)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.path == "edge_spec.loader.load":
            _show_as_made(func)
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = _with_arguments_listed(func.docstring.value, names)


def _show_as_made(load: griffe.Function) -> None:
    made = inspect.signature(edge_spec.load).parameters.values()
    load.decorators = []
    load.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                each.name,
                annotation=_type(each.annotation),
                kind=griffe.ParameterKind[each.kind.name.lower()],
                default=repr(each.default),
            )
            for each in made
        )
    )
    load.docstring = griffe.Docstring(inspect.getdoc(edge_spec.load) or "", parent=load)


def _type(annotation: Any) -> str:
    named = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:collections\.abc|pathlib)\.", "", named)


def _source(cls: griffe.Class, field: griffe.Attribute) -> list[str]:
    """Nothing of private fields and of those of `__init__` that have no type."""
    lines = cls.lines_collection[cls.filepath][field.lineno - 1 : field.endlineno]
    text = dedent("\n".join(lines))
    set_in_init = text.startswith("self.")
    if field.name.startswith("_") or (set_in_init and field.annotation is None):
        return []
    return [f"{field.name}: {field.annotation}"] if set_in_init else text.splitlines()


def _with_arguments_listed(text: str, names: set[str]) -> str:
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        match = ARGUMENT.match(line)
        if match and set(match[1].split(", ")) <= names:
            lines += [] if in_list else [""]
            lines.append(f"- `{match[1]}`: {line[match.end() :]}")
            in_list = True
        elif in_list and line.startswith("Raises"):
            lines += ["", line]
            in_list = False
        else:
            in_list = in_list and bool(line)
            lines.append(f"  {line}" if in_list else line)
    return "\n".join(lines)
