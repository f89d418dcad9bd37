"""Thoughts, text and calls of an answer, with the tokens that wrote each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.sampling import Score
from edge_spec.engine.answer_text import AnswerText
from edge_spec.engine.results import Chunk, DecodedToken, GenerationResult, Origin
from edge_spec.text.parts.answer_form import AnswerForm, ThoughtForm
from edge_spec.text.parts.part import PartKind
from edge_spec.text.tokenizer import Tokenizer
from edge_spec.text.tools.formats import GENERIC, HARMONY
from fixtures.echo_model import EOS, byte_tokenizer

THINK = ThoughtForm("<think>", "</think>", "\n</think>\n\n")
SPECIAL = ThoughtForm("[THINK]", "[/THINK]", "[/THINK]")
AIM, SAY = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CHANNELS = AnswerForm(ThoughtForm(AIM, "<|end|>", f"<|end|>{SAY}"), calls=HARMONY)
HEADED = AnswerForm(
    ThoughtForm("<c>aim<m>", "<end>", "<end><a><c>say<m>"), text_opening="<c>say<m>"
)
# Tags are spelled in bytes, and are one token, or part of one.
TOKENIZERS = [
    byte_tokenizer(["[THINK]", "[/THINK]"]),
    byte_tokenizer(["[THINK]", "[/THINK]"], ["<think>", "</think>"]),
    byte_tokenizer(["[THINK]", "[/THINK]"], ["o</", ">\n\n", "nk>Y", " <", "\n</think>"]),
]


def written(
    answer: str,
    form: AnswerForm,
    stops: Sequence[str] = (),
    sizes: Sequence[int] = (1,),
    tokenizer: Tokenizer = TOKENIZERS[0],
) -> tuple[GenerationResult, list[Chunk]]:
    """sizes: of rounds, in turn."""
    result = GenerationResult()
    text = AnswerText(result, tokenizer, (), stops, frozenset({EOS}), form)
    ids, chunks, turn = tokenizer.encode(answer), [], 0
    while ids and not text.stopped:
        size = sizes[turn % len(sizes)]
        scored = Score(-1.0, ())
        chunks += text.push([DecodedToken(each, Origin.PLAIN, score=scored) for each in ids[:size]])
        ids, turn = ids[size:], turn + 1
    return result, [*chunks, *text.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    ("answer", "form", "reasoning", "text"),
    [
        ("<think>\nso\n</think>\n\nYes.<eos>", AnswerForm(THINK), "so", "Yes."),
        ("\nso\n</think>\n\nYes.<eos>", AnswerForm(THINK, is_opened=True), "so", "Yes."),
        ("[THINK]so[/THINK]Yes.<eos>", AnswerForm(SPECIAL), "so", "Yes."),
        ("Yes <think>no</think>.<eos>", AnswerForm(THINK), "", "Yes <think>no</think>."),
        ("Yes [THINK]no.<eos>", AnswerForm(THINK), "", "Yes no."),  # no text shows a special token
        ("  <think>so</think> <think>a</think><eos>", AnswerForm(THINK), "so", "<think>a</think>"),
        ("  Yes. <eos>", AnswerForm(THINK), "", "  Yes. "),
        ("so it never", AnswerForm(THINK, is_opened=True), "so it never", ""),
        ("so</thin", AnswerForm(THINK, is_opened=True), "so</thin", ""),
        ("<thin", AnswerForm(THINK), "", "<thin"),
        ("<think></think>Yes.<eos>", AnswerForm(THINK), "", "Yes."),
        ("</think>Yes.<eos>", AnswerForm(THINK, is_opened=True), "", "Yes."),
        ("<eos>", AnswerForm(THINK, is_opened=True), "", ""),
        ("<think>so</think>\n</think>\nYes.<eos>", AnswerForm(THINK), "so", "Yes."),
        ("<think>so</think> </thin", AnswerForm(THINK), "so", "</thin"),
        (f"{AIM}so<|end|><|start|>assistant{SAY}Yes.<eos>", CHANNELS, "so", "Yes."),
        (f"{AIM}so<|end|>Yes.<eos>", CHANNELS, "so", "Yes."),
        (f"{AIM}<<c><|end|>Yes <<b>.<eos>", CHANNELS, "<<c>", "Yes <<b>."),
        (f"{AIM}so<|end|><|start|>assistant<|ch", CHANNELS, "so", ""),
        (f"{SAY}Yes.<eos>", CHANNELS, "", "Yes."),
        (f"so<|end|>{SAY}Yes.<eos>", replace(CHANNELS, is_opened=True), "so", "Yes."),
        ("<|chan", CHANNELS, "", "<|chan"),
        ("<c>aim<m>so<end><a><c>say<m>Yes.<eos>", HEADED, "so", "Yes."),
        ("<c>aim<m>so<end>Yes.<eos>", HEADED, "so", "Yes."),
        ("<c>aim<m>so<end><a><c>s", HEADED, "so", "<a><c>s"),
        ("<c>say<m>Yes.<eos>", HEADED, "", "Yes."),
        ("<c>so", HEADED, "", "<c>so"),
    ],
)
def test_a_thought_is_told_from_the_text(
    answer: str, form: AnswerForm, reasoning: str, text: str, tokenizer: Tokenizer
) -> None:
    result, chunks = written(answer, form, tokenizer=tokenizer)
    assert (result.reasoning, result.text) == (reasoning, text)
    for kind, whole in ((PartKind.REASONING, reasoning), (PartKind.TEXT, text)):
        assert "".join(chunk.text for chunk in chunks if chunk.kind is kind) == whole
        assert "".join(token.text for token in result.tokens if token.kind is kind) == whole


def test_each_token_has_the_text_that_it_wrote() -> None:
    result, _ = written(f"{AIM}<<c><|end|>{SAY}Yes <<b>.", CHANNELS)
    assert (result.reasoning, result.text) == ("<<c>", "Yes <<b>.")
    assert {token.text for token in result.tokens} <= {"", *"<c>Yes b."}


def test_a_token_may_write_of_two_parts() -> None:
    """It belongs to the first."""
    tokenizer = byte_tokenizer([], ["o\n</think>\n\nY"])
    answer = "<think>\nso\n</think>\n\nYes."
    result, _ = written(answer, AnswerForm(THINK), tokenizer=tokenizer)
    assert (result.reasoning, result.text) == ("so", "Yes.")
    texts = [token.text for token in result.tokens if token.kind is PartKind.REASONING]
    assert "".join(texts) == "so"


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS = AnswerForm(
    THINK,
    is_opened=True,
    calls=GENERIC,
    tools=[{"function": {"name": "f"}}],
)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    ("answer", "reasoning", "text", "num_calls"),
    [
        (f"so</think>\n\n{CALL}<eos>", "so", "", 1),
        (f"so\n{CALL}<eos>", "so", "", 1),  # the thought was not ended before it
        (f"so\n{CALL}\n{CALL}\n<eos>", "so", "", 2),
        (f"so\n{CALL}\n</think>\n\n<eos>", "so", "", 1),
        (f"so {CALL} or</think>Yes<eos>", f"so {CALL} or", "Yes", 0),
        (f"so {CALL}</think>Yes<eos>", f"so {CALL}", "Yes", 0),
        (f"so {CALL}</think>{CALL}<eos>", f"so {CALL}", "", 1),
        ("so <tool_call> is<eos>", "so <tool_call> is", "", 0),
        ("so <tool_call></think>Yes<eos>", "so <tool_call>", "Yes", 0),
        (f"so {CALL[:-20]}", f"so {CALL[:-20]}", "", 0),
        ("so " + CALL.replace('"f"', '"g"') + "<eos>", "so " + CALL.replace('"f"', '"g"'), "", 0),
    ],
)
def test_a_call_within_a_thought_is_one_where_it_ends_the_answer(
    answer: str, reasoning: str, text: str, num_calls: int, tokenizer: Tokenizer
) -> None:
    result, chunks = written(answer, CALLS, tokenizer=tokenizer)
    assert (result.reasoning, result.text) == (reasoning, text)
    assert [call["function"]["arguments"] for call in result.tool_calls] == ['{"a": 1}'] * num_calls
    assert sum(chunk.call is not None for chunk in chunks) == num_calls


PIECES = st.sampled_from(
    [
        CALL,
        "<tool_call>",
        "<think>",
        "</think>",
        "[THINK]",
        "\n",
        " ",
        "so",
        "Yes",
        "<",
        "</",
        "think>",
        "\u00e9",
        "st",
    ]
)


@given(
    answer=st.lists(PIECES, max_size=12).map("".join),
    is_opened=st.booleans(),
    form=st.sampled_from([AnswerForm(THINK), AnswerForm(SPECIAL), CALLS]),
    stops=st.lists(st.sampled_from(["st", "o\n", "<", "Yes<", "[THINK]"]), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    tokenizer=st.sampled_from(TOKENIZERS),
)
def test_parts_do_not_depend_on_rounds(
    answer: str, is_opened: bool, form: AnswerForm, stops: Any, sizes: Any, tokenizer: Any
) -> None:
    form = replace(form, is_opened=is_opened)
    expected, _ = written(answer, form, stops, tokenizer=tokenizer)
    result, chunks = written(answer, form, stops, sizes, tokenizer)
    assert without_ids(result) == without_ids(expected)
    streamed = GenerationResult()
    for chunk in chunks:
        streamed.add(chunk)
    assert (streamed.text, streamed.reasoning) == (result.text, result.reasoning)
    assert streamed.tool_calls == result.tool_calls
    assert [token.id for token in streamed.tokens] == [token.id for token in result.tokens]


def without_ids(result: GenerationResult) -> GenerationResult:
    """Those of calls are drawn."""
    return replace(result, tool_calls=[call["function"] for call in result.tool_calls])


def test_a_stop_string_ends_the_text_and_no_thought() -> None:
    tags = byte_tokenizer(["[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"])
    form = replace(CALLS, thought=None, is_opened=False)
    for stops in ((), ["st"]):  # which a call divides
        result, _ = written(f"s{CALL} </tool_call>t", form, stops, tokenizer=tags)
        assert (result.text, result.stop) == ("s t", None)
    assert written(f"s{CALL}t", form, ["st"])[0].text == "st"
    form = AnswerForm(THINK, is_opened=True)
    result, _ = written("so stop it\n</think>\n\nYes stop it", form, stops=["stop"])
    assert (result.reasoning, result.text) == ("so stop it", "Yes ")


@pytest.mark.parametrize("size", [1, 99])
@pytest.mark.parametrize(
    ("answer", "shown"), [(f"{SAY}so stop", b"so "), ("\ufffdstop", "\ufffd".encode())]
)
def test_a_stop_string_cuts_the_bytes_of_the_text_alone(
    answer: str, shown: bytes, size: int
) -> None:
    """What opens the text is no part of it, and U+FFFD may be a model's own."""
    tokenizer = byte_tokenizer([], ["so stop"])
    result, _ = written(answer, CHANNELS, ["stop"], [size], tokenizer)
    own = [token for token in result.tokens if token.text or token.id > 127]
    assert b"".join(token.raw or b"" for token in own) == shown
