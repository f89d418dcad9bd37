"""What a template is given beside the messages, and prompts that go on with the last message."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "The capital?"}
BEGUN = {"role": "assistant", "content": "It is "}
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMED = TURNS.replace("m.content", "m.content | trim")


def rendered(source: str, *messages: Any, tools: Any = (), **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", {"pad_token": "<pad>"}).render(
        messages, tools, **options
    )


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        # what is not given is None, as published templates ask for it in either way
        (
            "{{ tools is none }} {{ tools is defined }} {{ documents is none }}",
            {},
            "True True True",
        ),
        ("{{ documents[0].text }}", {"template_kwargs": {"documents": [{"text": "d"}]}}, "d"),
        ("{{ enable_thinking is defined }}", {}, "False"),
        ("{{ enable_thinking }}", {"template_kwargs": {"enable_thinking": False}}, "False"),
        ("{{ bos_token }}{{ pad_token }}{{ sep_token is defined }}", {}, "<s><pad>False"),
        ("{{ bos_token }}", {"template_kwargs": {"bos_token": "<b>"}}, "<b>"),
        ("{{ cls_token + 'a' + sep_token }}", {}, "a"),
        ("{{ limits }}", {"template_kwargs": {"limits": "x", "self": "y"}}, "x"),
        ("{{ add_generation_prompt }}", {}, "True"),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False"),
        ("{{ add_generation_prompt }}", {"template_kwargs": None}, "True"),
    ],
)
def test_a_template_is_given(source: str, options: Any, text: str) -> None:
    assert rendered(source, USER, **options) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (TURNS, "<user>The capital?</><assistant>It is "),
        (TRIMMED, "<user>The capital?</><assistant>It is"),
    ],
)
def test_the_last_message_is_continued(source: str, text: str) -> None:
    for asked in (None, False):
        options = {"continue_final_message": True, "add_generation_prompt": asked}
        assert rendered(source, USER, BEGUN, **options) == text
    assert rendered(source, USER, BEGUN) == text.rstrip() + (
        " </><assistant>" if source == TURNS else "</><assistant>"
    )


def test_an_empty_message_is_continued_and_text_that_was_there_before_is_not_cut() -> None:
    empty = {"role": "assistant", "content": ""}
    assert rendered(TURNS, empty, USER, empty, continue_final_message=True) == (
        "<assistant></><user>The capital?</><assistant>"
    )
    same = {"role": "user", "content": "It is "}
    assert rendered(TURNS, same, BEGUN, continue_final_message=True) == (
        "<user>It is </><assistant>It is "
    )


@pytest.mark.parametrize(
    ("source", "messages", "options", "named"),
    [
        (TURNS, [USER, BEGUN], {"add_generation_prompt": True}, "exclude each other"),
        (TURNS, [], {}, "last message has no content"),
        (TURNS.replace("m.content", "m.content | upper"), [USER, BEGUN], {}, "as it is"),
        ("{{ messages[0].content }}", [USER, BEGUN], {}, "as it is"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    source: str, messages: list[Any], options: Any, named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        rendered(source, *messages, continue_final_message=True, **options)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"messages": []}, "has messages"),
        ({"tools": []}, "has tools"),
        ({"add_generation_prompt": False}, "has add_generation_prompt"),
        ([1], "is a list"),
        ({1: 2}, "is a dict"),
    ],
)
def test_values_that_are_given_elsewhere_are_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(UsageError, match=f"template_kwargs {named}"):
        rendered(TURNS, USER, template_kwargs=given)


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UsageError, match="nested too deeply"):
        rendered(TURNS, USER, template_kwargs={"a": nested})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "The capital?"),
        ("a\n{%- generation -%}\n b \n{%- endgeneration -%}\n c", "abc"),
        (
            "{% for m in messages %}\n  {% generation %}\nx\n  {% endgeneration %}\n{% endfor %}",
            "x\n",
        ),
        # as in transformers, what is set within is not seen after
        ("{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}", "21"),
        (
            "{% set n = namespace(a=1) %}{% generation %}{% set n.a = 2 %}{% endgeneration %}"
            "{{ n.a }}",
            "2",
        ),
        (
            "{% macro f() %}{% generation %}{{ caller() }}{% endgeneration %}{% endmacro %}"
            "{% call f() %}in{% endcall %}",
            "in",
        ),
    ],
)
def test_tags_for_trainers_are_passed_over(source: str, text: str) -> None:
    assert rendered(source, USER) == text
