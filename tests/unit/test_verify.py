"""Acceptance: greedy verdicts over random trees, and the distribution of sampled tokens.

The distribution test draws the first three tokens many times and compares their joint
frequencies with exact probabilities by a chi-squared test. Deliberately broken rules have to
fail the same test, which shows that it has the power to find such a bug.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from edge_spec.model import Forward
from edge_spec.sampling import Sampler, SamplingParams
from edge_spec.testing import ScriptedModel, random_logits
from edge_spec.tree import TokenTree, Verdict
from edge_spec.verify import verify

Rule = Callable[[TokenTree, Forward, Sampler], Verdict]
Context = tuple[int, ...]


@st.composite
def trees_and_logits(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens, parents and small integer logits, so that ties are common."""
    vocab = draw(st.integers(3, 8))
    rows = draw(st.integers(1, 12))
    parents = [draw(st.integers(0, row)) for row in range(rows - 1)]
    row_logits = st.lists(st.integers(-3, 3), min_size=vocab, max_size=vocab)
    logits = draw(st.lists(row_logits, min_size=rows, max_size=rows))
    # Half of the guesses are right, or paths would hardly go deep.
    right = [logits[parent].index(max(logits[parent])) for parent in parents]
    tokens = [draw(st.sampled_from([token, token, *range(vocab)])) for token in right]
    return tokens, parents, logits


@given(case=trees_and_logits())
def test_a_greedy_verdict_is_the_path_of_the_targets_choices(make_tree: Any, case: Any) -> None:
    tokens, parents, logits = case
    tree = make_tree(0, tokens, parents)
    sampler = Sampler(SamplingParams(), [0], tie_margin=0.5)  # of integer logits: equal ones
    verdict = verify(tree, Forward(np.array(logits, np.float32)), sampler)
    choice = [row.index(max(row)) for row in logits]
    path = [0, *verdict.accepted_rows]
    for parent, row in itertools.pairwise(path):
        assert tree.parents[row] == parent
        assert tree.tokens[row] == choice[parent]
    assert verdict.tokens == tuple(choice[row] for row in path)
    assert verdict.kept == tuple(path)
    children = tree.children(path[-1])
    assert all(tree.tokens[child] != choice[path[-1]] for child in children)
    assert verdict.exhausted == (not children)
    assert verdict.near_ties == sum(logits[row].count(max(logits[row])) > 1 for row in path)


def test_verify_leaves_the_sampler_as_it_was() -> None:
    params = SamplingParams(temperature=1, seed=5, repetition_penalty=1.5)
    sampler, tree = Sampler(params, [0]), TokenTree.chain(0, [1, 2, 1])
    out = Forward(np.random.default_rng(0).normal(0, 1, (4, 3)).astype(np.float32))
    assert verify(tree, out, sampler) == verify(tree, out, sampler)


def test_penalties_reach_the_rows_below_a_guess() -> None:
    # Every row prefers token 1; once it is on the path the penalty turns the choice to 2.
    out = Forward(np.tile(np.array([0.0, 3.0, 2.0], np.float32), (4, 1)))
    sampler = Sampler(SamplingParams(presence_penalty=1.5), [0])
    verdict = verify(TokenTree.chain(0, [1, 2, 1]), out, sampler)
    assert verdict.tokens == (1, 2, 1, 1)  # 1 against 2: 3, 2; 1.5, 2; 1.5, 0.5; 1.5, 0.5


# --- the distribution of sampled tokens -------------------------------------------------------

DRAWS = 12_000
# A right rule fails with this probability a configuration; seeds are fixed, so it never will
# again once it passed. The broken rules below end under 1e-300 with fewer than half of the draws.
SMALLEST_P = 1e-6
LENGTH = 3


def exact_probs(logits: np.ndarray, params: SamplingParams) -> list[float]:
    """Temperature, top-k and top-p by definition; logits are distinct."""
    weights = [math.exp(float(logit) / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: params.top_k] if params.top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass < params.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(weights))]


def joint(model: ScriptedModel, prompt: Context, params: SamplingParams) -> dict[Context, float]:
    """Exact probability of every possible run of the first LENGTH tokens."""
    runs = {(): 1.0}
    for _ in range(LENGTH):
        runs = {
            (*run, token): mass * probability
            for run, mass in runs.items()
            for token, probability in enumerate(
                exact_probs(model.next_logits((*prompt, *run)), params)
            )
            if probability > 0
        }
    return runs


def opposed_tree(make_tree: Any, model: ScriptedModel, text: Context, branching: bool) -> TokenTree:
    """Guesses against the target: at each depth its least likely token, below which the tree
    goes on; with branching also the second least likely and the likeliest, each with children."""
    tokens: list[int] = []
    parents: list[int] = []

    def grow(row: int, context: Context, depth: int) -> None:
        order = np.argsort(model.next_logits(context)).tolist()
        below = []
        for token in (order[0], order[1], order[-1]) if branching else order[:1]:
            tokens.append(token)
            parents.append(row)
            below.append((len(tokens), (*context, token)))
        for child, longer in below if depth < 2 else ():
            grow(child, longer, depth + 1)

    grow(0, text, 1)
    return make_tree(text[-1], tokens, parents)


def p_value(
    make_tree: Any, rule: Rule, vocab: int, params: Any, branching: bool, draws: int = DRAWS
) -> float:
    """Of the chi-squared test of `draws` runs of LENGTH tokens; runs that cannot be give 0."""
    model = ScriptedModel(random_logits(vocab, order=3, scale=1.0), vocab)
    prompt = (1, 0)
    prepared: dict[Context, tuple[TokenTree, Forward]] = {}
    counts: Counter[Context] = Counter()
    for seed in range(draws):
        sampler = Sampler(SamplingParams(**params, seed=seed), prompt)
        text = prompt
        while len(text) < len(prompt) + LENGTH:
            if text not in prepared:
                session = model.open_session()
                session.prefill(text[:-1])
                tree = opposed_tree(make_tree, model, text, branching)
                prepared[text] = tree, session.forward(tree)
            verdict = rule(*prepared[text], sampler)
            sampler.observe(verdict.tokens)
            text += verdict.tokens
        counts[text[len(prompt) :][:LENGTH]] += 1
    expected = joint(model, prompt, SamplingParams(**params))
    if counts.keys() - expected.keys():
        return 0.0
    # The chi-squared approximation wants 5 expected draws a cell: rarer runs share one.
    common = [run for run, mass in expected.items() if mass * draws >= 5]
    observed = [counts[run] for run in common]
    masses = [expected[run] * draws for run in common]
    if len(common) < len(expected):
        observed.append(draws - sum(observed))
        masses.append(draws - sum(masses))
    return float(chisquare(observed, masses).pvalue)


@pytest.mark.parametrize(
    ("vocab", "params", "branching"),
    [
        (4, {"temperature": 0.5}, False),
        (6, {"temperature": 1.0}, True),
        (8, {"temperature": 2.0}, True),
        (8, {"temperature": 2.0, "top_k": 4}, False),
        (6, {"temperature": 0.5, "top_p": 0.9}, True),
        (5, {"temperature": 1.0, "top_k": 4, "top_p": 0.8}, True),
    ],
    ids=str,
)
def test_sampled_tokens_have_the_targets_joint_distribution(
    make_tree: Any, vocab: int, params: dict[str, float], branching: bool
) -> None:
    assert p_value(make_tree, verify, vocab, params, branching) > SMALLEST_P


def likeliest_guess(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: a guess that is the target's most probable token is always accepted."""
    best = int(logits[row].argmax())
    return best if best in tree.tokens[tree.children(row)] else None


def not_unlikely(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: a token is dropped because of its value, here one with less than 10 %."""
    chosen = sampler.choose(logits[row], range(tree.depths[row])).token
    probabilities = exact_probs(logits[row], sampler.params)
    return int(logits[row].argmax()) if probabilities[chosen] < 0.1 else None


def second_draw(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: after a rejection the token is drawn from all tokens, the rejected ones included."""
    chosen = sampler.choose(logits[row], range(tree.depths[row])).token
    if chosen in tree.tokens[tree.children(row)]:
        return None
    return sampler.choose(logits[row], range(100 + tree.depths[row])).token


def shared_draw(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: every row of a round is chosen by the first row's random number."""
    return sampler.choose(logits[row], []).token


@pytest.mark.parametrize("meddle", [likeliest_guess, not_unlikely, second_draw, shared_draw])
def test_broken_rules_fail_the_same_check(make_tree: Any, meddle: Any) -> None:
    def rule(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
        """`verify`, but where `meddle` names a token that one is chosen."""
        tokens: list[int] = []
        row = 0
        while True:
            token = meddle(tree, out.logits, row, sampler)
            if token is None:
                token = sampler.choose(out.logits[row], tokens).token
            tokens.append(token)
            right = [child for child in tree.children(row) if tree.tokens[child] == token]
            if not right:
                return Verdict(tuple(tokens), (), exhausted=False)
            row = right[0]

    params = {"temperature": 1.0}
    assert p_value(make_tree, rule, 6, params, branching=True, draws=5000) < SMALLEST_P
