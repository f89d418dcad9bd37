"""Answers with a thought before them: how long it may be, and what form follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec import Engine, FinishReason, GenerationResult, Grammar, PartKind, SamplingParams
from edge_spec.core.sampling import Constraint
from edge_spec.testing import ScriptedModel
from edge_spec.text.parts.answer_form import AnswerForm, ThoughtForm
from edge_spec.text.parts.thought_constraint import ThoughtConstraint
from edge_spec.text.token_pieces import TokenPieces
from fixtures.echo_model import EOS, byte_tokenizer, open_echo

OPENING, ENDING = "<think>\n", "\n</think>\n\n"
THINK = ThoughtForm("<think>", "</think>", ENDING)
# The template knows of thoughts, and opens none.
UNOPENED = "{{ '</think>'[:0] }}"
YES = Grammar.regex("yes|no")
JSON = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture(scope="module", params=["{{ '<think>\\n' }}", UNOPENED], ids=["opened", "unopened"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A model that answers with the message; in the template of one, a thought is opened."""
    with open_echo(opening=request.param) as opened:
        yield opened


def answer(engine: Engine, message: str, **options: Any) -> GenerationResult:
    """The same whether it is streamed and drafted or not."""
    whole = engine.chat(message, **options)
    shown = (whole.text, whole.reasoning, whole.reasoning_n, whole.finish_reason)
    streamed = GenerationResult()
    for chunk in engine.stream(message, prediction=message, **options):
        streamed.add(chunk)
    drafted = engine.last
    assert drafted is not None and (streamed.text, streamed.reasoning) == shown[:2]
    assert shown == (drafted.text, drafted.reasoning, drafted.reasoning_n, drafted.finish_reason)
    assert [token.id for token in whole.tokens] == [token.id for token in drafted.tokens]
    for kind, text in ((PartKind.TEXT, whole.text), (PartKind.REASONING, whole.reasoning)):
        assert "".join(token.text for token in whole.tokens if token.kind is kind) == text
    return whole


WHOLE, CUT = f"so it is{ENDING}yes", "so it is, so it goes"


@pytest.mark.parametrize(
    ("written", "options", "reasoning", "text"),
    [
        (WHOLE, {}, "so it is", "yes"),
        (WHOLE, {"grammar": YES}, "so it is", "yes"),
        (WHOLE, {"grammar": YES, "reasoning": 50}, "so it is", "yes"),
        (WHOLE, {"stop": "so"}, "so it is", "yes"),
        (WHOLE, {"stop": "es"}, "so it is", "y"),
        # a thought that never ends
        *((CUT, {"max_tokens": 5, "grammar": form}, "so it", "") for form in (None, YES, JSON)),
        (CUT, {"max_tokens": 5, "reasoning": 40}, "so it", ""),
        (CUT, {"max_tokens": 5, "reasoning": 40, "grammar": YES}, "so it", ""),
    ],
    ids=str,
)
def test_a_thought_comes_before_the_answer(
    engine: Engine, written: str, options: Any, reasoning: str, text: str
) -> None:
    if "max_tokens" in options and not opens_thoughts(engine):
        options = {**options, "max_tokens": options["max_tokens"] + len(OPENING)}
    result = answer(engine, OPENING + written, **options)
    assert (result.reasoning, result.text) == (reasoning, text)
    assert result.finish_reason is (FinishReason.STOP if text else FinishReason.LENGTH)
    assert result.reasoning_ms > 0


def test_before_a_form_a_thought_has_no_end_but_its_own(engine: Engine) -> None:
    result = answer(engine, f"{OPENING}so it is", max_tokens=40, grammar=YES)
    assert result.reasoning.startswith("so it is")
    assert (result.text, result.finish_reason) == ("", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("message", "budget", "reasoning"),
    [
        ("so it is", 5, "so it"),
        ("so it is", 1, "s"),
        ("so it is", 50, "so it is"),
        ("so\nit is", 3, "so"),
        ("so \u00e9t is", 4, "so \u00e9"),  # a character is ended
        ("so \U0001f999 is", 4, "so \U0001f999"),
        ("so </ it is", 5, "so"),  # a tag that is begun is ended
        ("so", 2, "so"),
    ],
)
@pytest.mark.parametrize("grammar", [None, YES])
def test_a_thought_is_ended_after_its_budget(
    engine: Engine, message: str, budget: int, reasoning: str, grammar: Grammar | None
) -> None:
    whole = f"{OPENING}{message}{ENDING}yes"
    budget += not opens_thoughts(engine)  # for the end of the line with the tag
    result = answer(engine, whole, reasoning=budget, grammar=grammar, max_tokens=200)
    assert result.reasoning == reasoning
    written = engine.parts.text.tokenizer.decode([token.id for token in result.tokens])
    ended = (OPENING if opens_thoughts(engine) else "") + written
    assert ended.startswith(f"{OPENING}{reasoning}{ENDING}") or "</" in message
    if grammar is not None:
        assert result.text in ("yes", "no") and result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("reasoning", ["off", 0])
@pytest.mark.parametrize("grammar", [None, YES])
def test_without_reasoning_the_answer_begins_at_once(
    engine: Engine, reasoning: Any, grammar: Grammar | None
) -> None:
    result = answer(engine, "yes", reasoning=reasoning, grammar=grammar, max_tokens=3)
    assert (result.reasoning, result.reasoning_n) == ("", 0)
    assert result.text[:1] in ("y", "n") if grammar else result.finish_reason is not None


@pytest.mark.parametrize("engine", [UNOPENED], indirect=True)
def test_a_thought_that_the_model_opens_all_the_same_is_ended_at_once(engine: Engine) -> None:
    result = answer(engine, f"{OPENING}so{ENDING}yes", reasoning="off", max_tokens=60)
    assert result.reasoning == "" and result.reasoning_n > 0


AIM, SAY = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
HEADED = (
    "{% set head = '<|channel|>final<|message|>' %}{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.role == 'assistant' %}{{ head }}{% endif %}{{ m.content }}<eos>{% endfor %}a:"
)


@pytest.mark.parametrize(
    ("written", "options", "reasoning", "text"),
    [
        (
            f"{AIM}so<|end|>{SAY}yes",
            {},
            "so",
            "yes",
        ),
        (
            f"{AIM}so<|end|>{SAY}yes",
            {"grammar": YES},
            "so",
            "yes",
        ),
        (f"{AIM}so<|end|>", {"grammar": YES}, "so", "no"),
        (f"{AIM}so far", {"grammar": YES, "reasoning": 2}, "so", "no"),
        (f"{SAY}yes", {}, "", "yes"),
        (f"{SAY}yes", {"grammar": YES}, "", "yes"),
    ],
)
def test_thoughts_and_text_have_headers(
    written: str, options: Any, reasoning: str, text: str
) -> None:
    with open_echo(template=HEADED) as engine:
        result = answer(engine, written, **options)
        assert (result.reasoning, result.text) == (reasoning, text)


def opens_thoughts(engine: Engine) -> bool:
    prompt = engine.parts.text.rendered([{"role": "user", "content": "a"}])
    return prompt.endswith(OPENING)


def constraint(
    inner: Constraint | None, tokenizer: Any, *, is_opened: bool, budget: int | None
) -> ThoughtConstraint:
    vocab_size = len(tokenizer.vocabulary())
    pieces = TokenPieces(tokenizer)
    form = AnswerForm(THINK, is_opened=is_opened, budget=budget)
    return ThoughtConstraint(form, THINK, pieces, vocab_size, [EOS], inner)


class _Digits:
    """Allows digits, and an end after two of them."""

    def __init__(self) -> None:
        self.count = 0

    def allowed(self, path: Any) -> np.ndarray:
        allowed = np.ones(SIZE, np.bool_)
        if self.num_allowed(path) == len(path):
            allowed[:] = False
            allowed[[EOS] if self.count + len(path) == 2 else range(ord("0"), ord("9") + 1)] = True
        return allowed

    def num_allowed(self, tokens: Any) -> int:
        for place, token in enumerate(tokens):
            is_end = self.count + place == 2
            if (token != EOS) if is_end else (token not in range(ord("0"), ord("9") + 1)):
                return place
        return len(tokens)

    def forced(self) -> list[int]:
        return []

    def observe(self, tokens: Any) -> None:
        assert self.num_allowed(tokens) == len(tokens)
        self.count += len(tokens)


TOKENIZERS = [
    byte_tokenizer(),
    byte_tokenizer((), ["<think>", "</think>"]),
    byte_tokenizer((), [">\n\n", ">1", "o</", "</think>\n", "</think>2", "<th"]),
]
SIZE = 400


@settings(max_examples=200)
@given(
    data=st.data(),
    tokenizer=st.sampled_from(TOKENIZERS),
    is_opened=st.booleans(),
    budget=st.sampled_from([None, 0, 1, 4]),
    has_inner=st.booleans(),
    observed=st.integers(0, 30),
)
def test_paths_and_single_tokens_are_allowed_alike(
    data: Any, tokenizer: Any, is_opened: bool, budget: Any, has_inner: bool, observed: int
) -> None:
    """What a path of draft tokens may have is what may be written one by one, and never an answer
    that is not of the form."""

    def made() -> ThoughtConstraint:
        inner = _Digits() if has_inner else None
        held = constraint(inner, tokenizer, is_opened=is_opened, budget=budget)
        held._vocab_size = SIZE  # beyond the tokenizer's, as models have it
        return held

    one_by_one, ahead, path = made(), made(), []
    likely = [*tokenizer.encode("<think>\n\u00e9 o</think>\n\n12"), EOS]
    for place in range(40):
        allowed = one_by_one.allowed([])
        assert (allowed == ahead.allowed(path[min(place, observed) :])).all()
        choices = [token for token in likely if allowed[token]] or np.flatnonzero(allowed).tolist()
        token = data.draw(st.sampled_from(choices))
        assert one_by_one.num_allowed([token]) == 1
        refused = np.flatnonzero(~allowed)
        if len(refused):
            assert one_by_one.num_allowed([int(refused[place % len(refused)])]) == 0
        one_by_one.observe([token])
        if place < observed:
            ahead.observe([token])
        path.append(token)
        if token == EOS:
            break
    written = b"".join(one_by_one._written(token) for token in path)
    _, closing, after = written.partition(b"</think>")
    if has_inner and closing and path[-1] == EOS:
        assert after.removesuffix(b"<eos>").strip().isdigit()


def thinker(seed: int) -> Engine:
    """A model that writes at random, and tags more often than other tokens."""
    tokenizer = byte_tokenizer((), ["<think>", "</think>"])
    opened = open_echo(opening=UNOPENED, tokenizer=tokenizer)
    size = len(tokenizer.vocabulary())
    bias = np.zeros(size, np.float32)
    bias[[*b"\n 12", EOS, *tokenizer.encode("<think></think>")]] = (5, 5, 5, 5, 4, 7, 5)

    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        draws = np.random.default_rng([seed, *(token + 1 for token in tokens[-2:])])
        logits = draws.normal(0, 2, size).astype(np.float32) + bias
        if tokens[-1] == ord(":") and seed % 2:  # where the answer begins
            logits[tokenizer.encode("<think>")] += 9
        return logits

    return Engine(replace(opened.parts, model=ScriptedModel(next_logits, size)))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=7)])
@pytest.mark.parametrize("asked", [{}, {"grammar": Grammar.regex("[12]{2,9}")}], ids=str)
@pytest.mark.parametrize("reasoning", ["auto", "off", 5])
def test_drafting_changes_no_answer_with_a_thought(
    sampling: SamplingParams, asked: Any, reasoning: Any
) -> None:
    kinds: set[PartKind] = set()
    accepted = 0
    for seed in range(5):
        with thinker(seed) as engine:
            options = {**asked, "reasoning": reasoning, "sampling": sampling, "max_tokens": 40}
            plain = engine.chat("a", **options)
            written = engine.parts.text.tokenizer.decode([token.id for token in plain.tokens])
            engine.set_drafter("suffix,recycling")
            drafted = engine.chat("a", prediction=written, **options)
        assert [token.id for token in plain.tokens] == [token.id for token in drafted.tokens]
        for name in ("text", "reasoning", "reasoning_n", "finish_reason"):
            assert getattr(plain, name) == getattr(drafted, name)
        kinds |= {token.kind for token in plain.tokens}
        accepted += drafted.stats.draft_n_accepted
        if asked and plain.finish_reason is FinishReason.STOP:
            assert set(plain.text) <= set("12")
        if reasoning == 5:
            assert plain.reasoning_n <= 5 + len("<think>\n</think>\n\n")
    assert accepted and PartKind.TEXT in kinds
    assert reasoning == "off" or PartKind.REASONING in kinds


def test_a_thought_that_is_cancelled_is_kept(engine: Engine, tmp_path: Path) -> None:
    message = f"{OPENING}so it is{ENDING}yes"
    generation = engine.stream(message, reasoning=50)
    for chunk in generation:
        if "i" in chunk.text:
            generation.cancel()
    result = generation.result
    assert (result.reasoning, result.text) == ("so i", "")
    assert result.finish_reason is FinishReason.CANCELLED
    engine.snapshot(tmp_path / "a")
    engine.restore(tmp_path / "a")
    assert answer(engine, message).reasoning == "so it is"
