"""Templates that would run for ever or fill the memory are ended; those of models are not."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest

from edge_spec.errors import UnsupportedModelError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.template_budget import TemplateLimits

USER = [{"role": "user", "content": "hi"}]
MAX_TRACED_BYTES = 100_000_000
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}X{% endfor %}{% endfor %}"
CHAIN = "{% set ns = namespace(x=()) %}{% for i in range(300) %}X{% endfor %}"
GROW = "{% set ns = namespace(s='ab', l=[1]) %}{% for i in range(99) %}X{% endfor %}{{ ns.l }}"

TOO_MUCH = {
    "a product": "{{ 'a' * 10**10 }}",
    "a list's product": "{{ [messages] * 10**9 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": GROW.replace("X", "{% set ns.s = (loop.index + 9) ** 4000 %}"),
    "sums": GROW.replace("X", "{% set ns.s = ns.s + ns.s %}"),
    "joined texts": GROW.replace("X", "{% set ns.s = ns.s ~ ns.s %}"),
    "a list of itself": GROW.replace("X", "{% set ns.l = [ns.l, ns.l] %}"),
    "a mapping of itself": GROW.replace("X", "{% set ns.l = {'a': ns.l, 'b': ns.l} %}"),
    "dict of itself": GROW.replace("X", "{% set ns.l = dict(a=ns.l, b=ns.l) %}"),
    "tuples in tuples": CHAIN.replace("X", "{% set ns.x = (ns.x,) %}"),
    "arguments of arguments": "{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    + CHAIN.replace("X", "{{ m(ns.x) }}"),
    "a cycler's items": CHAIN.replace("X", "{% set ns.x = cycler(ns.x).items %}"),
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "a namespace as text": "{% set ns = namespace(a=1) %}{{ ns }}",
    "a block": "{% set x %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
    "lists in a block": "{% set x %}{% for i in range(99999) %}{{ ['x' * 99999] }}{% endfor %}"
    "{% endset %}",
    "many values": "{% for i in range(99999) %}{% set x = 'x' * 99999 %}{% endfor %}",
    "many slices": "{% set x = 'x' * 99999 %}{% for i in range(99999) %}{% set y = x[1:] %}"
    "{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "output of the template's own text": "{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}",
    "a long sum": "{% set x = 'x' * 999999 %}{{ x" + " + x" * 3000 + " }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "str.join": "{{ ('x' * 99999).join('y' * 99999) }}",
    "replace": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "str.replace": "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
    "indent": "{{ 'x' | indent(10**9) }}",
    "indent by a text": "{{ ('x\n' * 9999) | indent('x' * 9999) }}",
    "tojson": "{{ messages | tojson(indent=10**9) }}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width of the value": "{{ '%*d' % (10**9, 1) }}",
    "a filter's width": "{{ '%(a)999999999d' | format(a=1) }}",
    "a field's width": "{{ '{:>999999999}'.format(1) }}",
    "a field in a field": "{{ '{:{}}'.format(1, 10**9) }}",
    "many fields": "{{ ('{0}' * 9999).format('x' * 9999) }}",
    "wide fields": "{{ ('{0:9999}' * 20000).format('x') }}",
    "precise fields": "{{ ('{0:.9999f}' * 20000).format(1.5) }}",
    "wide formats": "{{ ('%(a)9999s' * 20000) % {'a': 1} }}",
    "precise formats": "{{ ('%(a).9999f' * 20000) % {'a': 1} }}",
    "large numbers in a list": "{{ [2 ** 2000] * 499999 }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "center of a safe text": "{{ ('x' | safe).center(10**9) }}",
    "rounding": "{{ 2.5 | round(10**9) }}",
    "a sum of lists": "{{ [messages] * 9 | sum(start=[]) }}",
    "an attribute of many steps": "{{ messages | map(attribute='a.' * 999) | list }}",
    "an attribute of many parts": "{{ messages | max(attribute='" + "0." * 16 + "0') }}",
    "many attributes": "{{ messages | sort(attribute='" + "role," * 16 + "role') }}",
    "a long number": "{{ ('f' * 999999) | int(base=16) }}",
    "stripped characters": "{{ ('a' * 99999).strip('b' * 99999) }}",
    "trimmed characters": "{{ ('a' * 99999) | trim('b' * 99999) }}",
    "a search from the right": "{{ ('a' * 999999).rfind('ab' + 'a' * 99999) }}",
}
TOO_LONG = {
    "loops": LOOPS.replace("X", ""),
    "loops that go on": LOOPS.replace("X", "{% continue %}"),
    "loops that leave all out": "{% for a in range(99999) %}{% for b in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a test of each": "{% set x = range(99999) | list %}"
    "{{ range(99999) | select('in', x) | list }}",
    "recursion": "{% for i in range(9) recursive %}{% if loop.depth < 60 %}{{ loop(range(9)) }}"
    "{% endif %}{% endfor %}",
}
MANY_ITEMS = "{% set x = ('a' * 140000) | list %}"
LONG_TEXT = "{% set s = 'a' * 300000 %}"
DEEP = "('" + "0." * 15 + "0')"
TOO_LONG |= {  # each a few steps, that read much
    "an attribute of each": MANY_ITEMS
    + "{% set y = x[:4400] %}"
    + ("{% set z = y | max(attribute=" + DEEP + ") %}") * 100,  # too few if each were read once
    "attributes of attributes": MANY_ITEMS
    + "{{ x[:4400]"
    + (" | map(attribute=" + DEEP + ")") * 60
    + " | list | length }}",
    "in": MANY_ITEMS + "{% if 'b' in x %}{% endif %}" * 300,
    "is in": MANY_ITEMS + "{% if 'b' is in x %}{% endif %}" * 300,
    "a list and its like": MANY_ITEMS + "{% set y = x[:] %}" + "{% if x == y %}{% endif %}" * 300,
    "a hashed value": "{% set t = (1, 2) %}"
    + "{% set t = (t, t) %}" * 17
    + "{% set d = {1: 2} %}"
    + "{% if d[t] or t in d %}{% endif %}" * 300,
    "a list's method": MANY_ITEMS + "{% set y = x.count('b') %}" * 300,
    "is lower": "{% set s = ['a' * 300000] %}" + "{% if s[0] is lower %}{% endif %}" * 300,
    "a number": LONG_TEXT + "{% if s | float or 'g' in s %}{% endif %}" * 300,
    "from the right": LONG_TEXT + "{{ s.rfind('bbbb') }}" * 300,
}
# 175,000 levels, which weigh as little as many: Python's hash of a tuple calls itself in C.
HASHED = (
    "{% set ns = namespace(x=()) %}{% for i in range(7000) %}{% set ns.x = "
    + ("(" * 25 + "ns.x" + ",)" * 25)
    + " %}{% endfor %}{{ 1 if ns.x in {} else 2 }}"
)
RENDER = """
import sys
from edge_spec.errors import UnsupportedModelError
from edge_spec.text.chat_template import ChatTemplate
try:
    ChatTemplate(sys.argv[1]).render([{"role": "user", "content": "hi"}])
except UnsupportedModelError as error:
    print(error)
"""
NOT_FOR_TEMPLATES = ["{{ 'x'.encode('idna') }}", "{{ 'x'.translate({120: 'y' * 9}) }}"]
NOT_FOR_TEMPLATES += ["{{ (1).to_bytes(10**10, 'big') }}", "{{ lipsum(10**9) }}"]
NOT_FOR_TEMPLATES += ["{% autoescape true %}{{ 1 }}{% endautoescape %}", "{{ 'x' | center(9) }}"]


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_template_that_makes_too_much_is_ended(case: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedModelError) as caught:
            ChatTemplate(TOO_MUCH[case]).render(USER)
        assert tracemalloc.get_traced_memory()[1] < MAX_TRACED_BYTES
    finally:
        tracemalloc.stop()
    assert "chat template" in str(caught.value) and "refuses" not in str(caught.value)


def test_a_tuple_in_many_does_not_end_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RENDER, HASHED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "more than 200 deep" in done.stdout


def test_what_tools_nest_is_rendered() -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        nested = {"type": "object", "properties": {"a": nested}}
    assert '"string"' in ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}").render(
        USER, [nested]
    )


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_template_that_runs_for_too_long_is_ended(case: str) -> None:
    """The clock is looked at however it runs, and whenever something long is read; it counts how
    often, so that no machine's speed decides."""
    limits = TemplateLimits(1_000_000, 32_000_000, 20, clock=itertools.count().__next__)
    with pytest.raises(UnsupportedModelError, match="ran for more than"):
        ChatTemplate(TOO_LONG[case]).render(USER, limits=limits)


def test_what_prompts_format_is_no_large_value() -> None:
    source = (
        "{{ '%-9s|%5.2f' % ('ab', 2.5) }}|{{ '{:>9}|{:.2f}'.format('ab', 2.5) }}|{{ '%d%%' % 7 }}"
    )
    assert ChatTemplate(source).render(USER) == "ab       | 2.50|       ab|2.50|7%"


@pytest.mark.parametrize("operation", ["n // 3", "n % 3", "3 % n", "n + 1"])
def test_numbers_of_the_conversation_have_bounds_too(operation: str) -> None:
    template = ChatTemplate("{% set n = messages[0].n %}{{ (" + operation + ") > 0 }}")
    assert template.render([{**USER[0], "n": 2**4000}]) == "True"
    with pytest.raises(UnsupportedModelError, match="4,096 bits"):
        template.render([{**USER[0], "n": 2**5000}])


@pytest.mark.parametrize("source", NOT_FOR_TEMPLATES)
def test_what_no_template_needs_is_not_there(source: str) -> None:
    with pytest.raises(UnsupportedModelError):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        *("x" * 100_001, "{{ " + "[" * 900 + "]" * 900 + " }}", "{{ 1" + "+1" * 9000 + " }}"),
        *("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "{{ " + "9" * 9000 + " }}"),
    ],
    ids=["long", "nested", "a chain", "loops in loops", "a number"],
)
def test_a_source_that_the_compiler_cannot_take_is_refused(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match="does not compile"):
        ChatTemplate(source)


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ChatTemplate("{{ raise_exception('x' * 99999) }}").render(USER)
    assert len(str(caught.value)) < 1000


def test_a_run_that_was_ended_costs_the_next_one_nothing() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'x' * 10**9 }}{% endif %}ok")
    with pytest.raises(UnsupportedModelError):
        template.render(USER * 2)
    assert template.render(USER) == "ok"


# In the style of what models come with.
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + "
    "'\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
HEADERS = (
    "{%- if tools is not none and tools %}{{- 'Tools:\n' }}{%- for t in tools %}"
    "{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'tool' or m.role == 'ipython' %}{{- '<|ipython|>' }}"
    "{%- if m.content is mapping or m.content is iterable and m.content is not string %}"
    "{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}{%- else %}"
    "{{- '<|' + m.role + '|>\n\n' + m.content | trim + '<|eot|>' }}{%- endif %}{%- endfor %}"
)
THINKING = (
    "{%- set ns = namespace(open=true, last=messages | length - 1) %}"
    "{%- for m in messages[::-1] %}{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if ns.open and m.role == 'user' and not (m.content.startswith('<t>') and "
    "m.content.endswith('</t>')) %}{%- set ns.open = false %}{%- set ns.last = index %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}{%- set content = m.content %}"
    "{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].rstrip('\n')"
    ".split('<think>')[-1].lstrip('\n') %}{%- set content = content.split('</think>')[-1]"
    ".lstrip('\n') %}{%- if loop.index0 > ns.last or loop.last %}{{- thought.strip() }}"
    "{%- endif %}{%- endif %}{{- m.role + ': ' + content + '\n' }}{%- endfor %}"
)
MACROS = (
    "{%- macro kind(p) -%}{%- if p.type == 'array' -%}{{- 'list[' + kind(p['items']) + ']' -}}"
    "{%- else -%}{{- p.type -}}{%- endif -%}{%- endmacro -%}{%- for t in tools or [] %}"
    "{%- set f = t.function %}{{- f.name }}({%- for name, p in f.parameters.properties.items() %}"
    "{{- name ~ ': ' ~ kind(p) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %})\n"
    "{%- endfor %}{%- set loop_messages = messages[1:] if messages[0].role == 'system' else "
    "messages %}{%- for m in loop_messages | selectattr('role', 'in', ['user', 'assistant']) %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Roles must alternate') }}{%- endif %}{{- '[' ~ m.role | upper ~ ']' ~ "
    "m.content | replace('\r', '') }}{%- endfor %}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Is it 'wet' <there> & cold?",
            "parameters": {
                "type": "object",
                "properties": {"places": {"type": "array", "items": {"type": "string"}}},
            },
        },
    }
]
LONG = [
    message
    for number in range(200)
    for message in (
        {"role": "user", "content": f"{number}? " + "word " * 400},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n" + "answer " * 400},
    )
]


@pytest.mark.parametrize("source", [CHATML, HEADERS, THINKING, MACROS])
def test_templates_as_models_have_them_render_long_conversations_as_jinja_does(source: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(messages=LONG, add_generation_prompt=True)
    assert ChatTemplate(source).render(LONG) == expected
    assert len(expected) > 500_000


def test_tools_are_written_as_models_were_trained_with_them() -> None:
    rendered = ChatTemplate(HEADERS).render(LONG[:1], TOOLS)
    # Neither escaped for HTML nor sorted.
    assert '"type": "function",\n    "function"' in rendered
    assert "Is it 'wet' <there> & cold?" in rendered
    assert ChatTemplate(MACROS).render(LONG[:1], TOOLS).startswith("weather(places: list[string])")
