"""Finds out in which form a chat template wants calls of tools, from what it makes of some.

A form fits if its reader reads the same calls out of what the template has rendered; a template's
or a model's name is never looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product

from edge_spec.text.parts.part import PartKind
from edge_spec.text.plain_messages import THOUGHTS, Tools
from edge_spec.text.template_probes import ARGUMENTS, ASSISTANT, CALLED, RESULT, TOOLS
from edge_spec.text.tools.call_probes import CallProbes, Render
from edge_spec.text.tools.forms import FORMS, PYTHON, STATED
from edge_spec.text.tools.json_form import JsonForm
from edge_spec.text.tools.keyed_form import KeyedForm
from edge_spec.text.tools.keyed_probe import keyed_form
from edge_spec.text.tools.literals import tags_of
from edge_spec.text.tools.part_list import IdStyle
from edge_spec.text.tools.protocol import ToolForm
from edge_spec.text.tools.rendered_form import RenderedCalls, form_in

_LIST = re.compile(r'\[\s*\{\s*"name":\s*"[^"]*",\s*"arguments":')  # an example of calls
_PYTHON = re.compile(r"\[\w+\(\w+=[^()]*\)")
_CALLABLE: Tools = [
    *TOOLS,
    {"type": "function", "function": {**TOOLS[0]["function"], "name": CALLED}},
]


@dataclass(frozen=True)
class NativeTools:
    """Says how a template that knows tools wants calls in messages.

    silences: contents of a message that only calls; None: it has none. takes_mappings, takes_texts:
    arguments as an object, and as JSON text of one. takes_several: calls in one message.
    shows_calls, shows_results: else they have to stand in contents. shows_tools: else they have to
    be described in a message, or given with the system's one (tools_in_system). takes_text,
    takes_thought: a text before calls in a message, also one with a thought; else the text has to
    be a message of its own. ids: those that it takes.
    """

    form: ToolForm
    silences: tuple[str | None, ...]
    takes_mappings: bool
    takes_texts: bool
    takes_several: bool
    shows_calls: bool = True
    shows_results: bool = True
    shows_tools: bool = True
    tools_in_system: bool = False
    takes_text: bool = True
    takes_thought: bool = True
    ids: IdStyle = IdStyle.ANY


def native_tools(render: Render, tokens: Callable[[], Collection[str]]) -> NativeTools | None:
    """Returns None if the template shows no calls and tells of no form, or has them written in one
    that none of ours is.

    tokens: the added ones of the model, which tell of its form where the template does not.
    """
    probes = CallProbes(render)
    found: dict[tuple[str | None, bool], tuple[ToolForm, IdStyle]] = {}
    for is_text, silence in product((False, True), ("", None)):
        if is_text and not found and probes.shows_objects():
            break  # it would write a text as it is into a form that it writes objects in
        shown = _shown(probes, silence, is_text)
        if shown is not None and shown == next(iter(found.values()), shown):
            found[silence, is_text] = shown
    if not found:
        return _stated(probes, tokens())
    (silence, is_text), (form, ids) = next(iter(found.items()))
    return NativeTools(
        form,
        silences=tuple(dict.fromkeys(silence for silence, _ in found)),
        takes_mappings=any(not is_text for _, is_text in found),
        takes_texts=any(is_text for _, is_text in found),
        takes_several=probes.takes_several(silence, is_text),
        shows_tools=probes.shows_tools,
        tools_in_system=probes.tools_in_system,
        takes_text=probes.takes_text(is_text),
        takes_thought=probes.takes_text(is_text, **dict.fromkeys(THOUGHTS, ASSISTANT)),
        ids=ids,
    )


def _shown(
    probes: CallProbes, silence: str | None, is_text: bool
) -> tuple[ToolForm, IdStyle] | None:
    """Returns the form of calls in a message of these contents and arguments, and the ids that the
    template takes there."""
    whole = probes.prompt(silence, is_text)
    if whole is None or RESULT not in whole:
        return None
    for style in (probes.ids(silence, is_text), IdStyle.NAMED):
        rendered = probes.rendered(silence, is_text, style)
        if rendered is None:
            continue
        for form in _forms(probes, rendered, style, silence, is_text):
            if _reads(form, rendered.one, 1) and (
                rendered.two is None or _reads(form, rendered.two, 2)
            ):
                return form, style
    return None


def _forms(
    probes: CallProbes, rendered: RenderedCalls, style: IdStyle, silence: str | None, is_text: bool
) -> Iterator[ToolForm]:
    yield from FORMS
    derived: ToolForm | None = form_in(rendered, style)
    if derived is not None:
        yield derived
    if not is_text:
        derived = keyed_form(lambda calls: probes.shown(calls, silence))
    if derived is not None:
        yield derived


def _stated(probes: CallProbes, tokens: Collection[str]) -> NativeTools | None:
    """Returns the form that the template tells the model of, or else the one whose tags are tokens,
    where calls are not shown."""
    without = probes.without_tools() or ""
    if not (probes.shows_tools or probes.tools_in_system):
        return None
    for silence in ("", None):
        whole = probes.prompt(silence, is_text=False)
        if whole is None:
            continue
        # Of Python's calls, what some templates show is not what they tell the model to write.
        is_shown = any(value in whole for value in ARGUMENTS.values())
        forms = [form for form in STATED if not is_shown or form == PYTHON]
        told = (form for form in forms if _states(whole, form) and not _states(without, form))
        spelled = (form for form in forms if _tags(form) and _tags(form).issubset(tokens))
        form = next(told, next(spelled, None))
        if form is not None:
            return NativeTools(
                form,
                (silence,),
                takes_mappings=True,
                takes_texts=True,
                takes_several=True,
                shows_calls=False,
                shows_results=RESULT in whole,
                shows_tools=probes.shows_tools,
                tools_in_system=probes.tools_in_system,
            )
    return None


def _states(text: str, form: JsonForm | KeyedForm) -> bool:
    """Says whether a prompt tells the model of this form."""
    if tags := _tags(form):
        return all(tag in text for tag in tags)
    return (_PYTHON if isinstance(form, KeyedForm) else _LIST).search(text) is not None


def _tags(form: JsonForm | KeyedForm) -> set[str]:
    return set(tags_of(form.opening + form.closing))


def _reads(form: ToolForm, text: str, times: int) -> bool:
    """Says whether the form's reader reads the calls of a probe there, and no text."""
    reader = form.reader(_CALLABLE)
    parts = [*reader.push(text), *reader.finish()]
    if any(part.kind is PartKind.TEXT and part.text.strip() for part in parts):
        return False
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.call is not None:
            calls.append((part.call.name, ""))
        if part.kind is PartKind.CALL:
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    try:
        read = [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return False
    return not reader.is_cut and read == [(CALLED, ARGUMENTS)] * times
