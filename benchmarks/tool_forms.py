"""Tells of each chat template in a folder whether calls of tools have its own form.

    python benchmarks/tool_forms.py FOLDER [--all]

FOLDER holds templates as *.jinja; those that know no tools are listed with --all. Two calls in a
conversation are rendered, which have nested values, quotes, braces and letters of other languages.
read: they are read out of the prompt as they were given. written: so they are of what the form
itself writes. held: a grammar of the form allows that.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.parts.part import PartKind
from edge_spec.text.template_traits import TemplateTraits, fitted
from edge_spec.text.tools.detection import NativeTools
from edge_spec.text.tools.formats import ToolForm, answer_reader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fixtures import form_walks
from fixtures.chat_templates import SPECIAL_TOKENS

_USER = "How warm is it?"
_GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("weather_of", {"city": 'K\u00f6ln "am Rhein" {}', "days": 3, "units": {"celsius": True}}),
    ("weather_of", {"city": "\u6771\u4eac", "days": 1, "units": {"celsius": False}}),
]
_PROPERTIES = {
    "city": {"type": "string", "description": "Where it is."},
    "days": {"type": "integer", "description": "How many days ahead."},
    "units": {
        "type": "object",
        "description": "Of temperatures.",
        "properties": {"celsius": {"type": "boolean", "description": "Or Fahrenheit."}},
        "required": ["celsius"],
        "additionalProperties": False,
    },
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather_of",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": _PROPERTIES,
                "required": list(_PROPERTIES),
            },
        },
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    print("| template | tools | form | several | read | written | held |")
    print("|---|---|---|---|---|---|---|")
    for file in sorted(options.folder.glob("*.jinja")):
        template = ChatTemplate(file.read_text(encoding="utf-8"), special_tokens=SPECIAL_TOKENS)
        native = TemplateTraits(template.render).native_tools
        knows = _knows_tools(template)
        counts["templates"] += 1
        counts["that know tools"] += knows
        if not (knows or native or options.all):
            continue
        if native is None:
            print(f"| {file.stem} | {'listed' if knows else 'unknown'} | generic | | | | |")
            continue
        read, written, held = _checked(template, native)
        fits = "in its own form" if read and written and held else "in a form that fails"
        counts[fits] += 1
        counts[f"{fits}, of those that know tools"] += knows
        print(
            f"| {file.stem} | {'listed' if native.shows_tools else 'described'} "
            f"| `{' '.join(native.form.markers)!r}` | {_yes(native.takes_several)} "
            f"| {_yes(read)} | {_yes(written)} | {_yes(held)} |"
        )
    for name, count in counts.items():
        print(f"{count:5} {name}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _knows_tools(template: ChatTemplate) -> bool:
    messages = [{"role": "user", "content": "a"}]
    with suppress(EdgeSpecError):  # it is made for tools alone
        return template.render(messages, _TOOLS) != template.render(messages)
    return True


def _checked(template: ChatTemplate, native: NativeTools) -> tuple[bool, bool, bool]:
    given = _GIVEN if native.takes_several else _GIVEN[:1]
    calls = [
        {"id": f"probe000{n}", "function": {"name": name, "arguments": json.dumps(value)}}
        for n, (name, value) in enumerate(given)
    ]
    written = native.form.written(
        [
            {**call, "function": {**call["function"], "arguments": value}}
            for call, (_, value) in zip(calls, given, strict=True)
        ]
    )
    messages = [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    traits = TemplateTraits(template.render)
    try:
        prompt = template.render(*fitted(messages, _TOOLS, traits), add_generation_prompt=False)
    except EdgeSpecError as error:
        print("refused:", error)
        return False, False, False
    asked = template.render(*fitted(messages[:1], _TOOLS, traits))
    # An answer that is one of calls alone begins where the model does, others after a thought.
    begun = next(n for n in range(len(prompt) + 1) if not asked.startswith(prompt[: n + 1]))
    marker = next(iter(native.form.markers), "")
    starts = (begun, prompt.find(marker, prompt.find(_USER)))
    grammar = native.form.grammar(_TOOLS, required=True, several=True)
    without_end = re.sub(r"<\|[^<>]*\|>$", "", written)  # of the model's turn
    return (
        any(_calls(native.form, prompt[start:]) == given for start in starts),
        _calls(native.form, written) == given,
        any(form_walks.fits(grammar, each) for each in (written, without_end)),
    )


def _calls(form: ToolForm, text: str) -> list[tuple[str, Any]]:
    reader = answer_reader(AnswerForm(calls=form, tools=_TOOLS))
    found: list[tuple[str, str]] = []
    for part in [*reader.push(text), *reader.finish()]:
        if part.call is not None:
            found.append((part.call.name, ""))
        if part.kind is PartKind.CALL:
            found[-1] = found[-1][0], found[-1][1] + part.text
    try:
        return [(name, json.loads(arguments)) for name, arguments in found]
    except ValueError:
        return []


if __name__ == "__main__":
    main()
