"""No drafter changes the text, whatever the model, the policy and the rows of a pass."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.core.modes import JacobiInit
from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.jacobi import JacobiDrafter, LookaheadDrafter, WindowSize
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import PredictionDrafter, SuffixDrafter
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel
from fixtures.greedy_rounds import models, prompts

policies = st.builds(
    FixedPolicy,
    max_draft_tokens=st.integers(1, 30),
    min_confidence=st.sampled_from([0.0, 0.1, 0.4]),
    branches=st.booleans(),
    probes=st.booleans(),
)
fills, seeds = st.sampled_from(JacobiInit), st.integers(0, 100)
sizes = st.builds(
    WindowSize, width=st.integers(1, 5), ngram=st.integers(2, 5), draft_tokens=st.integers(1, 4)
)
suffix, recycling = st.builds(SuffixDrafter), st.builds(RecyclingDrafter)
lookahead = st.builds(LookaheadDrafter, size=sizes, fill=fills, seed=seeds)
jacobi = st.builds(JacobiDrafter, fill=fills, block=st.integers(1, 8), seed=seeds)
prediction = st.builds(PredictionDrafter, st.lists(st.integers(0, 2), max_size=24))
drafters = st.one_of(
    suffix,
    prediction,
    recycling,
    lookahead,
    jacobi,
    st.tuples(suffix, recycling, lookahead, jacobi).map(CompositeDrafter),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.just(0.8),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1000),
)
# As many examples for each drafter as the other tests of this kind have.
many = settings(max_examples=300)


@many
@given(model=models, prompt=prompts, drafter=drafters, policy=policies, rows=st.integers(1, 40))
def test_greedy_text_does_not_change(
    decode: Any,
    greedy: Any,
    model: ScriptedModel,
    prompt: list[int],
    drafter: Any,
    policy: FixedPolicy,
    rows: int,
) -> None:
    run = decode(model, prompt, [drafter], policy=policy, max_rows=rows)
    assert run.tokens == greedy(model, prompt, 20)


@many
@given(model=models, prompt=prompts, drafter=drafters, policy=policies, params=sampling)
def test_sampled_text_does_not_change(
    decode: Any,
    model: ScriptedModel,
    prompt: list[int],
    drafter: Any,
    policy: FixedPolicy,
    params: SamplingParams,
) -> None:
    plain = decode(model, prompt, params=params)
    assert decode(model, prompt, [drafter], params=params, policy=policy).tokens == plain.tokens
