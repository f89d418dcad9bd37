"""Acceptance: verdicts over random trees. Distributions are tested in test_distribution.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.model import Forward
from edge_spec.sampling import Sampler, SamplingParams
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


@given(case=trees_and_logits(), seed=st.integers(0, 1000), top_k=st.integers(0, 4))
def test_a_sampled_verdict_is_what_plain_decoding_draws_at_each_position(
    make_tree: Any, case: Any, seed: int, top_k: int
) -> None:
    """So the token after the path comes from the residual: it is none of the rejected guesses."""
    tokens, parents, logits = case
    tree, out = make_tree(0, tokens, parents), Forward(np.array(logits, np.float32))
    sampler = Sampler(SamplingParams(temperature=1, top_k=top_k, seed=seed), [0])
    verdict = verify(tree, out, sampler)
    path = [0, *verdict.accepted_rows]
    assert tree.path(path[-1]) == path
    assert [int(tree.tokens[row]) for row in path[1:]] == list(verdict.tokens[:-1])
    for position, row in enumerate(path):
        drawn = sampler.choose(out.logits[row], verdict.tokens[:position]).token
        assert verdict.tokens[position] == drawn
    rejected = tree.tokens[tree.children(path[-1])]
    assert verdict.next_token not in rejected and verdict.exhausted == (len(rejected) == 0)


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
