"""Templates that would run for ever, or make a text as long as a number says, are ended; those of
models are not."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_spec.errors import UnsupportedModelError
from edge_spec.text import chat_template
from edge_spec.text.chat_template import ChatTemplate, LimitError, TemplateSandbox, _run_within
from fixtures.chat_templates import TEMPLATES

USER = [{"role": "user", "content": "hi"}]
TOO_MUCH = {
    "a product": "{{ 'a' * 10**10 }}",
    "a product of the conversation": "{{ messages[0].content * 10**10 }}",
    "a list's product": "{{ 10**9 * [messages] }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a product of numbers": "{{ 2**4000 * 2**4000 }}",
}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}X{% endfor %}{% endfor %}"
TOO_LONG = {
    "loops": LOOPS.replace("X", ""),
    "loops that go on": LOOPS.replace("X", "{% continue %}"),
    "loops that leave all out": LOOPS.replace(" %}X", " if false %}"),
    "loops in a block": "{% set x %}" + LOOPS.replace("X", "") + "{% endset %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a test of each": "{% set x = range(99999) | list %}"
    "{{ range(99999) | select('in', x) | list }}",
    "recursion": "{% for i in range(9) recursive %}{% if loop.depth < 60 %}{{ loop(range(9)) }}"
    "{% endif %}{% endfor %}",
    "attributes of attributes": "{% set x = ('a' * 99999) | list %}{{ x"
    + (" | map(attribute='" + "0." * 99 + "0')") * 60
    + " | list | length }}",
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_template_that_makes_too_much_is_ended(case: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"more than \d") as caught:
        ChatTemplate(TOO_MUCH[case]).render(USER)
    assert "chat template" in str(caught.value) and "refuses" not in str(caught.value)


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_template_that_runs_for_too_long_is_ended(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(TOO_LONG[case])
    monkeypatch.setattr(chat_template, "_SECONDS", 0.01)
    with pytest.raises(UnsupportedModelError, match="ran for more than"):
        template.render(USER)


def test_a_run_that_was_ended_costs_the_next_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(
        "{% if messages | length > 1 %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
    )
    assert template.render(USER) == "hi"
    with monkeypatch.context() as patched:
        patched.setattr(chat_template, "_SECONDS", 0.01)
        with pytest.raises(UnsupportedModelError):
            template.render(USER * 2)
    assert template.render(USER) == "hi"


def test_a_run_is_ended_in_its_own_thread() -> None:
    sandbox = TemplateSandbox()
    template = sandbox.compile_within(10, LOOPS)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(sandbox.render_within, 0.01, template, {})
        while not run.done():
            assert sandbox.render_within(10, sandbox.compile_within(10, "a"), {}) == "a"
    assert isinstance(run.exception(), LimitError)


def test_an_interruption_never_comes_late() -> None:
    """The time is over while a run begins, goes on, or ends: it returns, or is ended."""
    for number in range(400):
        with suppress(LimitError):
            assert _run_within(number * 1e-6, lambda: sum(range(2000))) == 1999000
    assert sum(number for number in range(10_000)) == 49_995_000


def test_a_program_that_renders_can_be_traced() -> None:
    """While CPython 3.11 checks for another thread's exception, it calls a trace function forever.
    PyThreadState_SetAsyncExc without an exception makes it check without end."""
    program = """
import sys
from edge_spec.text.chat_template import ChatTemplate
ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "hi"}])
calls = []
sys.setprofile(lambda frame, event, value: calls.append(event))
(lambda: None)()
sys.setprofile(None)
print(calls.count("call"))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "1\n"


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


@pytest.mark.parametrize("name", ["turns", "namespaces", "macros"])
def test_long_conversations_render_as_in_jinja(name: str) -> None:
    messages = [
        {"role": role, "content": f"{number}? " + "word " * 400}
        for number in range(200)
        for role in ("user", "assistant")
    ]
    source = TEMPLATES[name].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    given = {"messages": messages, "tools": None, "add_generation_prompt": True}
    assert ChatTemplate(source).render(messages) == plain.from_string(source).render(given)
