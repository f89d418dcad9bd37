"""Calls and results of a conversation stand in prompts as the chat template wants them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.plain_messages import with_ordered_results
from edge_spec.text.template_traits import TemplateTraits, fitted
from edge_spec.text.tools.formats import FORMATS
from fixtures.call_templates import JSON, STATING, TEMPLATES, with_results

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NINE = with_results(
    TEMPLATES["mistral-v11"].replace(
        "{% set f = c.function %}",
        "{% set f = c.function %}{{ raise_exception('nine') if c.id | length != 9 }}",
    )
)


def prompt(
    source: str,
    calls: list[dict[str, Any]],
    ids: list[Any],
    tools: Any = (TOOL,),
    tokens: tuple[str, ...] = (),
) -> str:
    results = [
        {"role": "tool", "content": f"r{n}"} | ({} if id is None else {"tool_call_id": id})
        for n, id in enumerate(ids)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    template = ChatTemplate(source)
    messages = with_ordered_results([USER, message, *results])
    given = fitted(messages, tools, TemplateTraits(template.render, lambda: tokens))
    return template.render(*given)


def call(id: str | None, arguments: Any = '{"a": 1}') -> dict[str, Any]:
    named = {} if id is None else {"id": id}
    return {**named, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_ids_that_a_template_takes_stay() -> None:
    ids = ["abcdefghi", "123456789"]
    text = prompt(NINE, [call(ids[0]), call(ids[1])], [ids[1], ids[0]])
    assert [text.count(id) for id in ids] == [2, 2]
    assert f"{ids[1]}=r0" in text and f"{ids[0]}=r1" in text


@pytest.mark.parametrize("given", [["call_1", "call_2"], [None, None], ["x", None]])
def test_nine_letters_are_made_of_other_ids(given: list[str | None]) -> None:
    text = prompt(NINE, [call(id) for id in given], given)
    made = [part[:9] for part in text.split("[CALL_ID]")[1:]]
    assert len(set(made)) == 2 and all(id.isalnum() for id in made)
    assert f"{made[0]}=r0" in text and f"{made[1]}=r1" in text
    assert text == prompt(NINE, [call(id) for id in given], given)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("name", JSON)
def test_arguments_are_shown_once_whatever_their_kind(name: str, arguments: Any) -> None:
    source = with_results(TEMPLATES[name])
    text = prompt(source, [call("functions.f:0", arguments)], ["functions.f:0"])
    written = json.dumps({"a": 1}, indent=4 if name == "in a list in words" else None)
    assert "".join(text.split()).count("".join(written.split())) == 1


def test_a_template_that_only_tells_of_its_form_gets_calls_as_text() -> None:
    text = prompt(with_results(STATING), [call("1"), call("2")], ["1", "2"])
    given = '{"name": "f", "arguments": {"a": 1}}'
    assert f"<|assistant|><|tool_call|>[{given}, {given}]<|end|>" in text
    assert "1=r0" in text


def test_a_template_that_shows_calls_and_no_tools_has_them_described() -> None:
    source = with_results(TEMPLATES["deepseek-v3"]).partition("}}")[2]
    text = prompt(source, [call("1")], ["1"])
    assert text.startswith("<|system|>") and json.dumps(TOOL["function"]) in text
    opening = FORMATS["deepseek-v3"].opening
    assert f"{opening}NAME\n```json" in text and f"{opening}f\n```json" in text


def test_a_template_of_one_call_a_message_gets_each_before_its_result() -> None:
    source = with_results(TEMPLATES["mistral-v13"]).replace(
        "{%- if m.tool_calls -%}",
        "{%- if m.tool_calls -%}{{ raise_exception('one') if m.tool_calls | length > 1 }}",
    )
    ids = ["a", "b", "c"]
    text = prompt(source, [call(id, {"n": id}) for id in ids], ["b", "c", "a"])
    places = [
        text.index(shown)
        for id, result in zip(ids, ["r2", "r0", "r1"], strict=True)
        for shown in (f'[TOOL_CALLS]f[ARGS]{{"n": "{id}"}}', f"{id}={result}")
    ]
    assert places == sorted(places)
    assert text.count("[TOOL_CALLS]f[ARGS]") == 3


REFUSING = "{{ raise_exception('both') if m.content and m.thinking }}"
AFTER = "{% if m.tool_calls %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "thought", "is_apart"),
    [
        (TEMPLATES["hermes"], "", False),
        (TEMPLATES["hermes"].replace("{%- if m.tool", REFUSING + "{%- if m.tool"), "", True),
        (TEMPLATES["hermes"].replace("{%- if m.tool", REFUSING + "{%- if m.tool"), "t", True),
        (
            TEMPLATES["hermes"]
            .replace("{{ m.content or '' }}", "{{ '' if m.tool_calls else m.content }}")
            .replace("<|end|>", AFTER + "<|end|>"),
            "",
            True,
        ),
    ],
)
def test_a_text_that_has_no_place_before_calls_is_a_message_before(
    source: str, thought: str, is_apart: bool
) -> None:
    message = {"role": "assistant", "content": "said", "tool_calls": [call("1")]}
    message |= {"reasoning_content": thought, "thinking": thought} if thought else {}
    template = ChatTemplate(with_results(source))
    messages, _ = fitted([USER, message], [TOOL], TemplateTraits(template.render))
    said = [each.get("content") or "" for each in messages[1:]]
    assert said == (["said", ""] if is_apart else ["said"])
    text = template.render(messages, [TOOL])
    assert text.index("said") < text.index("<tool_call>")


TELLING = (  # of tools in the message of the system
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tools %}<|tools|>{{ m.tools }}{% endif %}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("tokens", "written"),
    [
        (["<|tool_call|>", "<|/tool_call|>"], "<|tool_call|>[{}]<|/tool_call|>"),
        (["<|tool_call|>"], "<|tool_call|>[{}]"),
        (["<tool_call>", "</tool_call>"], "<tool_call>\n{}\n</tool_call>"),
    ],
)
def test_tokens_tell_of_a_form_that_the_template_does_not_show(
    tokens: list[str], written: str
) -> None:
    text = prompt(TELLING, [call("1")], ["1"], tokens=tuple(tokens))
    call_text = written.format('{"name": "f", "arguments": {"a": 1}}')
    assert f"<|assistant|>{call_text}<|end|>" in text
    assert f"<|system|><|tools|>{json.dumps([TOOL['function']])}<|end|>" in text
    assert "<|tool|>r0<|end|>" in text
    loop = "{%- for m in messages -%}"
    losing = STATING.replace(loop, loop.replace(" -%}", " if m.role != 'tool' -%}"))
    text = prompt(losing, [call("1")], ["1"], tokens=tuple(tokens))
    assert "<|user|><tool_response>\nr0\n</tool_response><|end|>" in text


def test_without_such_tokens_tools_are_described() -> None:
    text = prompt(TELLING, [call("1")], ["1"])
    assert "<|tools|>" not in text and json.dumps(TOOL["function"]) in text
    assert '<|assistant|><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text


def test_tokens_tell_nothing_of_a_template_that_lists_no_tools() -> None:
    source = TELLING.replace("{% if m.tools %}<|tools|>{{ m.tools }}{% endif %}", "")
    text = prompt(source, [call("1")], ["1"], tokens=("<|tool_call|>", "<|/tool_call|>"))
    assert "<|tool_call|>" not in text
    assert '<|assistant|><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"x"', "", None, {}])
@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_mean_no_object_are_shown(name: str, arguments: Any) -> None:
    source = with_results(TEMPLATES[name])
    given = call("functions.f:0", arguments)
    if arguments is None:
        del given["function"]["arguments"]
    text = prompt(source, [given], ["functions.f:0"])
    assert "r0" in text and "None" not in text
    if arguments:
        assert arguments in text or json.dumps(arguments)[1:-1] in text


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", None])
def test_arguments_that_mean_no_object_are_shown_in_text(arguments: Any) -> None:
    tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    text = prompt(TELLING, [call("1", arguments)], ["1"], tokens=tokens)
    assert "<|tool_call_start|>[f(" in text
