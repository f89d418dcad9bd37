"""Chat templates are programs of strangers: sandboxed, and their failures are ours to explain."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.plain_messages import ROLES

USER = [{"role": "user", "content": "hi"}]


def test_a_template_gets_messages_tokens_and_the_prompt_for_an_answer() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
        "<s>",
        "</s>",
    )
    assert template.render(USER) == "<s>[user]hi</s>[assistant]"


def test_blocks_leave_no_blank_lines_and_loops_can_be_left() -> None:
    source = (
        "{%- for m in messages %}\n    {% if loop.index > 1 %}\n{% break %}\n    {% endif %}\n"
        "{{ m.content }}\n{% endfor %}"
    )
    assert ChatTemplate(source).render(USER * 3) == "hi\n"


def test_a_template_may_ask_for_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) in {
        str(year) for year in (datetime.now().year, datetime.now().year - 1)
    }


def test_content_is_inserted_as_it_is() -> None:
    content = "<b> & {{ 7 * 7 }} {% raw %} \u20ac"
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": content}]) == content


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


def test_what_a_template_refuses_with_is_shown() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UnsupportedModelError, match="roles must alternate"):
        template.render(USER)


def test_a_model_without_a_template_is_told_apart() -> None:
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        ChatTemplate(None)


@pytest.mark.parametrize("role", ROLES)
def test_each_role_is_accepted(role: str) -> None:
    assert ChatTemplate("{{ messages[0].role }}").render([{"role": role, "content": ""}]) == role


@pytest.mark.parametrize(
    "message", [{}, {"role": "User", "content": "a"}, {"role": "user", "content": None}]
)
def test_a_malformed_message_is_a_usage_error(message: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="role"):
        ChatTemplate("x").render([message])


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_tools_and_their_calls_reach_the_template() -> None:
    template = ChatTemplate(
        "{% if tools %}{{ tools[0].function.name }}|{% endif %}{% for m in messages %}{{ m.role }}:"
        "{{ m.content or m.tool_calls[0].function.name }}{{ m.tool_call_id or '' }};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]},
        {"role": "tool", "content": "yes", "tool_call_id": "7"},
    ]
    rendered = template.render(messages, TOOLS)
    assert rendered == "weather|user:rain?;assistant:weather;tool:yes7;"


def test_tools_that_a_template_ignores_are_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UsageError, match="knows no tools"):
        template.render([{"role": "user", "content": "rain?"}], TOOLS)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant", "content": None, "tool_calls": []}, "''"),
        ({"role": "assistant", "tool_calls": None}, "''"),
        ({"role": "assistant", "reasoning_content": "hm"}, "''"),
        ({"role": "tool", "tool_call_id": "a", "content": None}, "''"),
        # an answer that calls tools has none, as in transformers
        ({"role": "assistant", "content": None, "tool_calls": [1]}, "None"),
        ({"role": "assistant", "content": "", "tool_calls": [1]}, "''"),
        ({"role": "user", "content": []}, "''"),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            "'ab'",
        ),
        ({"role": "developer", "content": "a"}, "'a'"),
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


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "of the type image_url"),
        ({"type": "text"}, "of the type text"),
        ("a", "of the type str"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_name(part: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ChatTemplate("x").render([{"role": "user", "content": [part]}])


def test_a_template_that_reads_parts_gets_parts() -> None:
    parts = ChatTemplate("{% for part in messages[0].content %}{{ part.text }};{% endfor %}")
    assert parts.render(USER) == "hi;"
    either = "{% if messages[0].content is string %}text{% else %}parts{% endif %}"
    assert ChatTemplate(either).render(USER) == "text"


def test_messages_and_tools_that_are_nested_too_deeply_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    template = ChatTemplate("{{ tools | length }}")
    with pytest.raises(UsageError, match="nested too deeply"):
        template.render([{"role": "assistant", "content": None, "tool_calls": nested}])
    with pytest.raises(UsageError, match="nested too deeply"):
        template.render(USER, [{"type": "function", "function": {"parameters": nested}}])
