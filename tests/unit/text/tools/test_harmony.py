"""Answers of messages in channels are read, and held to calls."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from edge_spec.text.grammar import Grammar
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.plain_messages import Tools
from edge_spec.text.tools.formats import HarmonyForm, answer_reader
from fixtures import form_walks

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: Tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
LIMA = '{"city": "Lima"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
IN_ROLE = f" to=functions.weather<|channel|>commentary json<|message|>{LIMA}"
IN_CHANNEL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{LIMA}"


def read(text: str, cuts: list[int]) -> tuple[list[tuple[str, str]], bool]:
    """What is read: kinds or, of calls, names, and texts."""
    reader = answer_reader(AnswerForm(calls=HarmonyForm(), tools=TOOLS))
    parts = []
    for start, end in pairwise(sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})):
        parts += reader.push(text[start:end])
    read: list[tuple[str, str]] = []
    for part in [*parts, *reader.finish()]:
        name = part.kind.value if part.call is None else part.call.name
        goes_on = part.call is None and read and (part.kind.value in (read[-1][0], "call"))
        if goes_on:
            read[-1] = read[-1][0], read[-1][1] + part.text
        else:
            read.append((name, part.text))
    return [(name, text) for name, text in read if text], reader.is_cut


@pytest.mark.parametrize(
    ("text", "parts", "is_cut"),
    [
        ("<|channel|>final<|message|>Hi <b>", [("text", "Hi <b>")], False),
        ("<|start|>assistant<|channel|>final<|message|>Hi", [("text", "Hi")], False),
        (f"{THOUGHT}<|channel|>final<|message|>Hi", [("reasoning", "Hm."), ("text", "Hi")], False),
        (
            f"{THOUGHT}<|channel|>final<|message|>Hi<|return|>",
            [("reasoning", "Hm."), ("text", "Hi")],
            False,
        ),
        (f"{THOUGHT}{IN_ROLE}", [("reasoning", "Hm."), ("weather", LIMA)], False),
        (f"{THOUGHT}{IN_ROLE}<|call|>", [("reasoning", "Hm."), ("weather", LIMA)], False),
        (IN_CHANNEL, [("weather", LIMA)], False),
        (IN_CHANNEL.replace("commentary", "analysis"), [("weather", LIMA)], False),
        (IN_CHANNEL.replace("functions.", ""), [("weather", LIMA)], False),
        (IN_CHANNEL[:-3], [("weather", LIMA[:-3])], True),
        (IN_CHANNEL.partition("<|constrain")[0], [], True),
        ("<|channel|>commentary to=functions.weather<|message|>", [("weather", "{}")], False),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{IN_ROLE}",
            [("text", "I look."), ("weather", LIMA)],
            False,
        ),
        (
            "<|channel|>commentary to=assistant<|channel|>final<|message|>Hi",
            [("text", "Hi")],
            False,
        ),
        (f"{THOUGHT}<|channel|>analysis<|message|>More<|end|>", [("reasoning", "Hm.More")], False),
        (
            "<|channel|>commentary to=python code<|message|>1 + 1<|call|>",
            [("reasoning", "1 + 1")],
            False,
        ),
        ("Hi, without a header", [("text", "Hi, without a header")], False),
        ("<|channel|>", [], False),
        ("", [], False),
    ],
)
def test_headers_tell_thoughts_text_and_calls_apart(
    text: str, parts: list[tuple[str, str]], is_cut: bool
) -> None:
    for seed in range(8):
        cuts = random.Random(seed).sample(range(10_000), seed)
        assert read(text, cuts) == (parts, is_cut)
    assert read(text, list(range(len(text)))) == (parts, is_cut)


def test_an_answer_is_held_to_a_call_or_text_after_other_messages() -> None:
    said = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Hi"
    texts = [final, f"{THOUGHT}{final}", f"<|start|>assistant{final}"]
    calls = [IN_ROLE, IN_CHANNEL, f"{THOUGHT}{said}{IN_ROLE}", f"<|start|>assistant{IN_CHANNEL}"]
    never = ["Hi", IN_ROLE.replace("city", "town"), IN_ROLE.replace("weather", "other")]
    form = HarmonyForm()
    asked = form.grammar(TOOLS, required=False, several=True)
    required = form.grammar(TOOLS, required=True, several=True)
    for text in [*texts, *calls, *never]:
        assert form_walks.fits(asked, text) == (text not in never), text
        assert form_walks.fits(required, text) == (text in calls), text
    number = Grammar.json_schema({"type": "integer"})
    held = form.grammar(TOOLS, required=False, several=False, text=number)
    assert form_walks.fits(held, "<|channel|>final<|message|>5")
    assert not form_walks.fits(held, final)


def test_what_is_written_is_read_back() -> None:
    written = HarmonyForm().written(
        [{"function": {"name": "weather", "arguments": {"city": "Lima"}}}]
    )
    assert read(written, []) == ([("weather", LIMA)], False)
