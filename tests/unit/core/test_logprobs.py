"""Log probabilities: the model's own, beside the right tokens, with and without drafting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.errors import UsageError
from edge_spec.text.grammar import Grammar

PROMPT = list(b"abcabcabcabc")


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("drafters", [[], [SuffixDrafter()]], ids=["plain", "suffix"])
def test_each_token_has_the_probability_that_the_model_gave_it(
    make_engine: Any, remembers_all: Any, temperature: float, drafters: list[Any]
) -> None:
    model = remembers_all()
    sampling = SamplingParams(temperature=temperature, top_k=5, presence_penalty=1.0, seed=1)
    engine = make_engine(model, drafters)
    text = list(PROMPT)
    result = engine.generate(text, max_tokens=20, sampling=sampling, logprobs=3)
    for token in result.tokens:
        logits = model.next_logits(tuple(text)).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert token.logprob == pytest.approx(expected[token.id])
        assert [each.id for each in token.alternatives] == np.argsort(-expected)[:3].tolist()
        assert [each.logprob for each in token.alternatives] == pytest.approx(
            np.sort(expected)[::-1][:3].tolist()
        )
        text.append(token.id)


def test_only_where_they_are_asked_for(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all())
    [plain] = engine.generate(PROMPT, max_tokens=1).tokens
    assert plain.logprob is None and not plain.alternatives and "logprob" not in plain.to_dict()
    [alone] = engine.generate(PROMPT, max_tokens=1, logprobs=0).tokens
    assert alone.logprob is not None and not alone.alternatives
    scored = {"logprob", "name", "bytes", "alternatives"}
    assert set(alone.to_dict()) == {"id", "text", "origin"} | scored
    with pytest.raises(UsageError, match="logprobs is 21"):
        engine.generate(PROMPT, logprobs=21)


def test_a_grammar_does_not_change_them(make_engine: Any, remembers_all: Any) -> None:
    """They tell what the model thinks, not what it was allowed."""
    model = remembers_all()
    result = make_engine(model).generate(PROMPT, grammar=Grammar.regex("[xyz]{3}"), logprobs=1)
    logits = model.next_logits(tuple(PROMPT)).astype(np.float64)
    token = result.tokens[0]
    assert token.logprob == pytest.approx(logits[token.id] - np.log(np.exp(logits).sum()))
    assert token.alternatives[0].id == logits.argmax() != token.id
