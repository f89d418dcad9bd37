"""One engine over many requests: its cache, its refusals, its drafters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.results import FinishReason
from edge_spec.errors import ContextFullError, UsageError
from edge_spec.scheduler.lossless import ExactPolicy, Losslessness
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, random_logits

EOS, VOCAB = 258, 260  # of the byte tokenizer


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        ("hello world and more", 11),
        ("hello there", 6),  # "hello "; "th" is one token
        ("hello world", 10),
        ("hello", 4),
        ("other", 0),
    ],
)
@pytest.mark.parametrize("drafters", [[], [SuffixDrafter()]], ids=["plain", "suffix"])
def test_reusing_a_prefix_changes_nothing(
    make_engine: Any,
    remembers_all: Any,
    byte_tokenizer: Any,
    drafters: list[Any],
    second: str,
    cached: int,
) -> None:
    engine = make_engine(remembers_all(), drafters)
    engine.generate("hello world", max_tokens=12)
    reused = engine.generate(second, max_tokens=20)
    fresh = make_engine(remembers_all()).generate(second, max_tokens=20)
    assert [token.id for token in reused.tokens] == [token.id for token in fresh.tokens]
    assert reused.stats.cached_n == cached and fresh.stats.cached_n == 0
    assert reused.stats.prompt_n == len(byte_tokenizer.encode(second))


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_a_new_generation_ends_the_one_before_and_is_not_disturbed_by_it(
    make_engine: Any, remembers_all: Any, num_chunks: int
) -> None:
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    earlier = engine.generate("hello", stream=True)
    for _ in range(num_chunks):
        next(earlier)
    result = engine.generate("hello world", max_tokens=10)
    fresh = make_engine(remembers_all()).generate("hello world", max_tokens=10)
    assert [token.id for token in result.tokens] == [token.id for token in fresh.tokens]
    assert earlier.result.finish_reason == FinishReason.CANCELLED
    assert len(earlier.result.tokens) == num_chunks
    assert list(earlier) == []
    assert engine.last is result


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_failure_in_a_round_the_engine_answers_as_a_fresh_one(
    make_engine: Any, remembers_all: Any, error: type[BaseException]
) -> None:
    class Failing(SuffixDrafter):
        rounds = 0

        def observe(self, *outcome: Any) -> None:
            self.rounds += 1
            if self.rounds == 3:
                raise error
            super().observe(*outcome)

    engine = make_engine(remembers_all(), [Failing()])
    with pytest.raises(error):
        engine.generate("hello", max_tokens=10)
    result = engine.generate("hello world", max_tokens=10)
    fresh = make_engine(remembers_all()).generate("hello world", max_tokens=10)
    assert [token.id for token in result.tokens] == [token.id for token in fresh.tokens]


def test_the_longest_prompt_gets_one_token_and_a_longer_one_is_refused(
    make_engine: Any, remembers_all: Any
) -> None:
    engine = make_engine(remembers_all(context_length=8))
    result = engine.generate([1] * 8)
    assert len(result.tokens) == 1 and result.finish_reason == FinishReason.LENGTH
    with pytest.raises(ContextFullError, match="9 tokens"):
        engine.generate([1] * 9)
    assert len(engine.generate([1] * 5).tokens) == 4


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("", {}),
        ([], {}),
        ([1, -1], {}),
        ([VOCAB], {}),
        ([1], {"max_tokens": 0}),
        ([1], {"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}),
        ([1], {"sampling": SamplingParams(logit_bias={-1: 1.0})}),
        ([1] * 600, {}),
    ],
)
def test_a_refused_request_does_not_disturb_the_running_one(
    make_engine: Any, remembers_all: Any, prompt: Any, options: Any
) -> None:
    engine = make_engine(remembers_all())
    running = engine.generate("hello", max_tokens=5, stream=True)
    next(running)
    with pytest.raises(UsageError):
        engine.generate(prompt, **options)
    assert len(running.finish().tokens) == 5


@pytest.mark.parametrize("prompt", [None, 5, ["a"], [1.5], [True], b"abc", [[1]], {"a": 1}])
def test_a_prompt_is_text_or_tokens(prompt: Any, make_engine: Any, remembers_all: Any) -> None:
    with pytest.raises(UsageError, match="the prompt is") as caught:
        make_engine(remembers_all()).generate(prompt)
    assert "a text, or a list of token ids" in caught.value.remedy


@pytest.mark.parametrize("messages", [None, 5, b"a", {"role": "user", "content": "a"}, {"a"}])
def test_messages_are_a_text_or_a_list(messages: Any, make_engine: Any, remembers_all: Any) -> None:
    with pytest.raises(UsageError, match="the messages are") as caught:
        make_engine(remembers_all()).chat(messages)
    assert "a list of" in caught.value.remedy


def test_an_unknown_drafter_changes_nothing(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    running = engine.generate("hello", max_tokens=5, stream=True)
    next(running)
    with pytest.raises(UsageError, match="nonesuch"):
        engine.set_drafter("suffix,nonesuch")
    assert len(running.finish().tokens) == 5
    assert len(engine._conversation.decoder.drafters) == 1
    engine.set_drafter("none")
    assert engine.generate("hello", max_tokens=2).stats.plain_reasons == {"off": 2}


def test_plain_decoding_does_not_use_a_cache_with_the_noise_of_drafting(make_engine: Any) -> None:
    engine = make_engine(ScriptedModel(random_logits(260), 260))
    noisy = replace(engine.parts.speculation_factory, lossless=Losslessness(tie_margin=0.5))
    engine._drafting._parts = replace(engine.parts, speculation_factory=noisy)
    cached = []
    for names in ("none", "auto", "lookahead", "none", "none", "suffix"):
        engine.set_drafter(names)
        cached.append(engine.generate([1, 2, 3, 4], max_tokens=3).stats.cached_n)
    assert cached == [0, 3, 3, 0, 3, 3]


@pytest.mark.parametrize("widths", [(1, 4), (2, 4, 8), (4,)])
@pytest.mark.parametrize("max_tokens", [3, None])
@pytest.mark.parametrize("drafters", [[], [SuffixDrafter()]], ids=["plain", "suffix"])
def test_exact_mode_writes_to_the_end_of_the_context(
    make_engine: Any,
    greedy: Any,
    widths: tuple[int, ...],
    max_tokens: int | None,
    drafters: list[Any],
) -> None:
    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        return np.eye(3, dtype=np.float32)[(tokens[-1] + 1) % 3]

    prompt, context_length = [0, 1, 2, 0], 16
    model = ScriptedModel(next_logits, 3, context_length)
    policy = ExactPolicy(FixedPolicy(), widths)
    result = make_engine(model, drafters, policy, widths[0]).generate(prompt, max_tokens=max_tokens)
    # The narrowest pass has to fit; the last token needs no place in the cache. Drafting must
    # not write more than plain decoding does.
    longest = context_length - widths[0] + 1
    count = max_tokens or longest - len(prompt) + 1
    assert [token.id for token in result.tokens] == greedy(model, prompt, count)


def test_an_interrupt_while_closing_leaves_nothing_open(
    make_engine: Any, remembers_all: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, closed = remembers_all(), []
    model.close = lambda: closed.append(True)
    engine = make_engine(model)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._drafting, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert closed == [True]


def test_drafters_and_policy_survive_a_block_without_drafting(
    make_engine: Any, remembers_all: Any
) -> None:
    drafter, policy = SuffixDrafter(), FixedPolicy(min_confidence=0.0)
    engine = make_engine(remembers_all(), [drafter], policy)
    prompt = list(b"one two one two one two")
    drafted = engine.generate(prompt, max_tokens=24)
    learnt = drafter.state()["acceptance"].copy()
    with engine.without_drafting():
        plain = engine.generate(prompt, max_tokens=24)
    assert plain.stats.plain_reasons == {"off": plain.stats.rounds}
    assert plain.stats.cached_n == len(prompt) - 1
    assert [token.id for token in plain.tokens] == [token.id for token in drafted.tokens]
    assert np.array_equal(drafter.state()["acceptance"], learnt)
    again = engine.generate(prompt, max_tokens=24)
    assert again.stats.draft_n > 0
    assert not np.array_equal(drafter.state()["acceptance"], learnt)


def test_what_drafters_learnt_is_kept_once_something_was_answered(
    make_engine: Any, remembers_all: Any
) -> None:
    """Whatever drafter is in use at the end."""
    kept: list[dict[str, list[float]]] = []
    for answers in (0, 1):
        engine = make_engine(remembers_all(), [SuffixDrafter()], keep_learnt=kept.append)
        for _ in range(answers):
            engine.generate(list(b"abcabcabcabc"), max_tokens=20)
        engine.set_drafter("none")
        engine.close()
    [learnt] = kept
    unlearnt = SuffixDrafter().state(learnt_only=True)["acceptance"]
    assert learnt["suffix"] != unlearnt.ravel().tolist()
