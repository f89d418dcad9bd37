"""Chat templates are programs of strangers: sandboxed, and their failures are ours to explain."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.plain_messages import ROLES

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
            "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
            "<s>[user]hi</s>[user]hi</s>[assistant]",
        ),
        # no blank lines of blocks, and loops that are left
        (
            "{%- for m in messages %}\n    {% if loop.index > 1 %}\n{% break %}\n    {% endif %}\n"
            "{{ m.content }}\n{% endfor %}",
            "hi\n",
        ),
        # contents are text or parts of text, as the template reads them
        ("{% for part in messages[0].content %}{{ part.text }};{% endfor %}", "hi;"),
        ("{% if messages[0].content is string %}text{% else %}parts{% endif %}", "text"),
        # tags for trainers; as in transformers, what is set within is not seen after
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("a\n{%- generation -%}\n b \n{%- endgeneration -%}\n c", "abc"),
        (
            "{% for m in messages %}\n  {% generation %}\nx\n  {% endgeneration %}\n{% endfor %}",
            "x\nx\n",
        ),
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
def test_a_conversation_renders(source: str, text: str) -> None:
    assert ChatTemplate(source, "<s>", "</s>").render(USER * 2) == text


def test_a_template_may_ask_for_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) in {
        str(year) for year in (datetime.now().year, datetime.now().year - 1)
    }


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ ('{0.__globals__}'|attr('format'))(raise_exception) }}",  # CVE-2025-27516
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    # Jinja's sandbox either raises or makes an unsafe attribute undefined, which renders as "".
    try:
        rendered = ChatTemplate(source).render(USER)
    except UnsupportedModelError:
        rendered = ""
    assert rendered == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% for m in messages %}",
        "{{ unknown_filter | nonesuch }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ nonesuch + 'a' }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ range(10 ** 6) | list }}",
        "{{ '{x}'.format() }}",
        "{{ '{}'.format() }}",
        "{{ 'x'.encode('nonesuch') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_is_an_unsupported_model_in_one_line(source: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ChatTemplate(source).render(USER)
    assert "\n" not in str(caught.value)
    assert "raise" not in source or "roles must alternate" in str(caught.value)


def test_a_model_without_a_template_is_told_apart() -> None:
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        ChatTemplate(None)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({}, "role"),
        ({"role": "User", "content": "a"}, "role"),
        ({"role": "user", "content": None}, "role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "of the type image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "of the type text"),
        ({"role": "user", "content": ["a"]}, "of the type str"),
    ],
)
def test_a_malformed_message_is_a_usage_error(message: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ChatTemplate("x").render([message])


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant", "content": None, "tool_calls": []}, "''"),
        ({"role": "assistant", "tool_calls": None}, "''"),
        ({"role": "assistant", "reasoning_content": "hm"}, "''"),
        ({"role": "tool", "tool_call_id": "a", "content": None}, "''"),
        ({"role": "assistant", "content": None, "tool_calls": [1]}, "''"),
        ({"role": "user", "content": []}, "''"),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            "'ab'",
        ),
        ({"role": "developer", "content": "a"}, "'a'"),
        *(({"role": role, "content": ""}, "''") for role in ROLES),
    ],
)
def test_what_is_not_said_is_an_empty_text(message: Any, shown: str) -> None:
    template = ChatTemplate("{{ [messages[0].content | default(none)] }}{{ messages[0].role }}")
    role = {"developer": "system"}.get(message["role"], message["role"])
    assert template.render([message]) == f"[{shown}]{role}"


def test_thoughts_have_each_name_that_templates_read() -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}")
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert template.render([{"role": "assistant", "content": "", name: "hm"}]) == "hmhm"


def test_what_is_nested_too_deeply_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}{{ (a or '') | tojson }}")
    with pytest.raises(UnsupportedModelError, match="recursion"):
        template.render([{"role": "assistant", "content": None, "tool_calls": nested}])
    with pytest.raises(UnsupportedModelError, match="recursion"):
        template.render(USER, template_kwargs={"a": nested})
    with pytest.raises(UnsupportedModelError, match="recursion"):
        template.render(USER, [{"type": "function", "function": {"parameters": nested}}])


# --- options of prompts

ASKED = {"role": "user", "content": "The capital?"}
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
    assert rendered(source, ASKED, **options) == text


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
        assert rendered(source, ASKED, BEGUN, **options) == text
    assert rendered(source, ASKED, BEGUN) == text.rstrip() + (
        " </><assistant>" if source == TURNS else "</><assistant>"
    )


def test_an_empty_message_is_continued_and_text_that_was_there_before_is_not_cut() -> None:
    empty = {"role": "assistant", "content": ""}
    assert rendered(TURNS, empty, ASKED, empty, continue_final_message=True) == (
        "<assistant></><user>The capital?</><assistant>"
    )
    same = {"role": "user", "content": "It is "}
    assert rendered(TURNS, same, BEGUN, continue_final_message=True) == (
        "<user>It is </><assistant>It is "
    )


@pytest.mark.parametrize(
    ("source", "messages", "options", "named"),
    [
        (TURNS, [ASKED, BEGUN], {"add_generation_prompt": True}, "exclude each other"),
        (TURNS, [], {}, "last message has no content"),
        (TURNS.replace("m.content", "m.content | upper"), [ASKED, BEGUN], {}, "as it is"),
        ("{{ messages[0].content }}", [ASKED, BEGUN], {}, "as it is"),
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
        rendered(TURNS, ASKED, template_kwargs=given)
