"""The forms in which models write calls that are not found in what a chat template renders."""

from __future__ import annotations

import json
from dataclasses import replace

from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.harmony import HarmonyForm
from edge_spec.text.tools.json_form import JsonForm
from edge_spec.text.tools.keyed_form import KeyedForm
from edge_spec.text.tools.protocol import ToolForm
from edge_spec.text.tools.value_style import ValueStyle

GENERIC = JsonForm()  # where the chat template knows no tools
FORMS: tuple[ToolForm, ...] = (HarmonyForm(),)
PYTHON = KeyedForm(
    opening="[",
    head="(",
    key_opening="",
    key_closing="=",
    value_closing="",
    closing=")]",
    between="), ",
    comma=", ",
    style=ValueStyle('"', has_python_words=True),
)
# Forms that some templates tell the model of and do not show, or that tokens alone tell of.
STATED: tuple[JsonForm | KeyedForm, ...] = (
    GENERIC,
    JsonForm("<|tool_call|>[", between=", ", closing="]<|/tool_call|>"),
    JsonForm("<|tool_call|>[", between=", ", closing="]"),
    JsonForm("[", between=", ", closing="]"),
    PYTHON,
    replace(PYTHON, opening="<|tool_call_start|>[", closing=")]<|tool_call_end|>"),
)


def marks_texts(form: ToolForm) -> bool:
    """Says whether answers have marks of the form around their text, too."""
    return isinstance(form, HarmonyForm)


_DESCRIPTION = """\
You may call these functions. Each is described in JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON in this form:
{call}
{several}If no function helps, answer without a call."""
_SEVERAL = """\
Several calls follow one another. What they return comes next, between <tool_response> tags. """


def described(tools: Tools, form: ToolForm = GENERIC) -> str:
    """Returns what a system message says of tools where the chat template does not."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}}
    several = _SEVERAL if form is GENERIC else ""
    return _DESCRIPTION.format(tools=listed, call=form.written([example]), several=several)
