"""What a template says of thoughts, and an answer of a form after one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.grammar import Grammar
from edge_spec.text.parts.answer_form import TAGS, AnswerForm, ThoughtForm, speaks_of_thoughts
from edge_spec.text.parts.part import PartKind
from edge_spec.text.tools.formats import HARMONY, answer_reader
from fixtures.echo_model import EOS, byte_tokenizer

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
)
CHOSEN = "{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}"
HELLO = [{"role": "user", "content": "Hi <think>\n"}]


def chat_format(opening: str) -> ChatFormat:
    return ChatFormat(byte_tokenizer(), f"{TURNS}{opening}{{% endif %}}", (EOS,), None)


@pytest.mark.parametrize(
    ("opening", "closed"),
    [
        ("<think>\n", "<think>\n\n</think>\n\n"),
        ("<think>", "<think>\n</think>\n\n"),
        ("<think>\n\n", "<think>\n\n</think>\n\n"),
        ("<seed:think>\n", "<seed:think>\n</seed:think>"),
        ("[THINK]", "[THINK][/THINK]"),
        ("<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>"),
        (CHOSEN, "<think></think>"),  # as the template itself writes it
        ("<think></think>\n", "<think></think>\n"),
        ("So <thinks>", "So <thinks>"),
        ("", ""),
    ],
)
def test_a_thought_is_closed_that_the_template_opens(opening: str, closed: str) -> None:
    text = chat_format(opening).rendered(HELLO, reasoning="off")
    assert text == f"<user>Hi <think>\n<eos><assistant>{closed}"
    plain = chat_format(opening).rendered(HELLO)
    assert plain.startswith("<user>Hi <think>\n<eos><assistant>")
    assert plain.endswith("<think>\n") if opening == CHOSEN else plain.endswith(opening)


THINK = ("<think>", "</think>", "\n</think>\n\n")
# Of a message of the assistant: what is written before its content, and where one begins.
SHOWN = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
FINAL = "<|channel|>final<|message|>"
CHANNELS = (
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><a>{% endif %}" + FINAL
)
SWITCHED = "{% if thinking %}<think>{% else %}</think>{% endif %}"


@pytest.mark.parametrize(
    ("before", "begun", "form"),
    [
        (SHOWN, "", THINK),
        (SHOWN, "<think>\n", THINK),
        (SHOWN, "<think>\n\n</think>\n\n", THINK),
        (SHOWN.replace("\n\n{%", "\n{%"), "", ("<think>", "</think>", "\n</think>\n")),
        (CHANNELS, "", ("<|channel|>analysis<|message|>", "<|end|>", f"<|end|><a>{FINAL}")),
        ("{{ m.content.split('</think>')[-1] }}", "", THINK),  # thoughts are left out of histories
        ("", SWITCHED, THINK),
        ("", "[THINK]", ("[THINK]", "[/THINK]", "[/THINK]")),
        ("{{ m.reasoning_content }}", "", None),
        ("", "", None),
    ],
)
def test_the_form_of_thoughts_is_found_in_the_template(
    before: str, begun: str, form: tuple[str, str, str] | None
) -> None:
    source = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}<u>{{{{ m.content }}}}{{% else %}}<a>"
        f"{before}{{{{ m.content }}}}{{% endif %}}<eos>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<a>{begun}{{% endif %}}"
    )
    text = ChatFormat(byte_tokenizer(), source, (EOS,), None)
    prompt = text.chat_prompt("Hi")
    found, shown = text.answer_form(prompt), text.tokenizer.decode(prompt).rstrip()
    if form is None:
        assert found is None
    else:
        assert found is not None and found.thought == ThoughtForm(*form)
        assert found.text_opening == (FINAL if before == CHANNELS else "")
        assert found.is_opened == shown.endswith(form[0])
        assert found.is_closed == shown.endswith(form[1])


ACTED = "<|START_THINKING|>{{ m.thinking }}<|END_THINKING|><|START_RESPONSE|>{{ m.content }}"
TAGGED = "<think>\n{{ m.reasoning_content }}\n</think>\n<answer>\n{{ m.content }}"


@pytest.mark.parametrize(
    ("said", "answer", "calls"),
    [
        (ACTED, "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>Yes.", None),
        (ACTED, "<|START_RESPONSE|>Yes.", None),
        (TAGGED, "<think>\nso\n</think>\n<answer>\nYes.", None),
        (f"{CHANNELS}{{{{ m.content }}}}", f"{FINAL}Yes.", HARMONY),
    ],
)
def test_what_opens_the_text_of_an_answer_is_no_text(said: str, answer: str, calls: Any) -> None:
    source = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}<u>{{{{ m.content }}}}{{% else %}}<a>"
        f"{said}{{% endif %}}<eos>{{% endfor %}}{{% if add_generation_prompt %}}<a>{{% endif %}}"
    )
    text = ChatFormat(byte_tokenizer(), source, (EOS,), None)
    form = text.answer_form(text.chat_prompt("Hi"))
    assert form is not None and form.calls is calls
    reader = answer_reader(form)
    parts = [*(part for sign in answer for part in reader.push(sign)), *reader.finish()]
    for kind, expected in ((PartKind.REASONING, "so"), (PartKind.TEXT, "Yes.")):
        found = "".join(part.text for part in parts if part.kind is kind).strip()
        assert found == (expected if expected in answer else "")


@pytest.mark.parametrize(
    ("prompt", "is_passed", "left"),
    [
        ("<a>", False, "<c>say<m>"),
        ("<a><c>say<m>", True, ""),  # the prompt opens the text
        ("<a><c>aim<m>so<end>", True, ""),
        ("<u>say<m>", False, "<a><c>say<m>"),
    ],
)
def test_what_a_prompt_says_of_the_text(prompt: str, is_passed: bool, left: str) -> None:
    form = ThoughtForm("<c>aim<m>", "<end>", "<end><a><c>say<m>")
    assert form.is_passed_by(prompt) == is_passed
    assert form.text_opening_after(prompt) == left


def test_tags_of_the_vocabulary_are_those_of_thoughts() -> None:
    codec = byte_tokenizer(["[THINK]", "[/THINK]"])
    text = ChatFormat(codec, f"{TURNS}{{% endif %}}", (EOS,), None)
    found = text.answer_form(text.chat_prompt("Hi"))
    assert found is not None and found.thought == ThoughtForm("[THINK]", "[/THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("last", "field", "is_opened"),
    [
        ({"content": "<think>\nso"}, True, True),
        ({"content": "<think>\nso</think>\nYes"}, True, False),
        ({"content": "Yes"}, True, False),
        ({"content": "", "reasoning_content": "so"}, "reasoning_content", True),
    ],
)
def test_an_answer_goes_on_within_a_thought(last: Any, field: Any, is_opened: bool) -> None:
    source = (
        "{% for m in messages %}<a>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
        "\n</think>\n\n{% endif %}{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    text = ChatFormat(byte_tokenizer(), source, (EOS,), None)
    asked: Any = {"continue_final_message": field}
    prompt = text.chat_prompt([*HELLO, {"role": "assistant", **last}], **asked)
    found = text.answer_form(prompt, **asked)
    assert found is not None and found.is_opened == is_opened
    assert found.thought == (ThoughtForm(*THINK) if is_opened else None)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "budget"),
    [
        (None, "<think>\n", None),
        ("auto", "<think>\n", None),
        (7, "<think>\n", 7),
        ("off", "<think>\n\n</think>\n\n", 0),
        (0, "<think>\n\n</think>\n\n", 0),
    ],
)
def test_reasoning_is_a_switch_or_a_budget(reasoning: Any, prompt: str, budget: int | None) -> None:
    text = chat_format("<think>\n")
    tokens = text.chat_prompt(HELLO, reasoning=reasoning)
    assert text.tokenizer.decode(tokens).endswith(f"<assistant>{prompt}")
    form = text.answer_form(tokens, reasoning=reasoning)
    opened = prompt == "<think>\n"
    expected = AnswerForm(
        ThoughtForm(*THINK), is_opened=opened, is_closed=not opened, budget=budget
    )
    assert form == expected


def test_a_model_without_a_switch_is_held_to_no_thought() -> None:
    text = chat_format("{{ '</think>'[:0] }}")  # it opens thoughts by itself
    form = text.answer_form(text.chat_prompt(HELLO, reasoning="off"), reasoning="off")
    assert form == AnswerForm(ThoughtForm(*THINK), budget=0)


@pytest.mark.parametrize(("_", "closing"), TAGS[:-1])  # the last one ends any message
def test_a_grammar_that_writes_any_known_closing_speaks_of_thoughts(_: str, closing: str) -> None:
    assert speaks_of_thoughts(f'root ::= {json.dumps(closing, ensure_ascii=False)} "x"')


@pytest.mark.parametrize("closing", [r"<\|END_THINKING\|>", r"<\|end_of_thought\|>"])
def test_a_regex_that_escapes_a_closing_speaks_of_thoughts(closing: str) -> None:
    assert not Grammar.regex(f"(.|\n)*{closing}[0-9]+").is_of_answer


@pytest.mark.parametrize("value", ["on", -1, True, 1.5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="reasoning is"):
        chat_format("<think>\n").chat_prompt(HELLO, reasoning=value)


@pytest.mark.parametrize("reasoning", ["auto", "off", 5])
@pytest.mark.parametrize("given", ["enable_thinking", [1]])
def test_values_that_are_no_mapping_are_refused_with_any_switch(reasoning: Any, given: Any) -> None:
    with pytest.raises(UsageError, match="template_kwargs is a"):
        chat_format("<think>\n").chat_prompt(HELLO, reasoning=reasoning, template_kwargs=given)


def test_a_budget_turns_thoughts_on() -> None:
    text = chat_format(SWITCHED)
    assert text.rendered(HELLO, reasoning=5).endswith("<think>")
    assert text.rendered(HELLO).endswith("</think>")
    own: Any = {"template_kwargs": {"thinking": False}}
    assert text.rendered(HELLO, reasoning=5, **own).endswith("</think>")
    asked: Any = {"template_kwargs": {"thinking": True}}
    assert text.rendered(HELLO, **asked).endswith("<think>")
    assert text.rendered(HELLO, reasoning="off", **asked).endswith("</think>")
