"""What heads say becomes draft tokens as the target would choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge_spec.core.heads import HeadScores
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.drafting import RowScores, head_scores
from edge_spec.drafters.heads.independent import MedusaDrafter
from edge_spec.drafters.protocol import Budget

VOCAB = 12
PROMPT = [1, 2, 3]
LOGITS = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)


class Heads:
    """Three that always say the same."""

    vocab_size, num_heads, shares_output = VOCAB, 3, True
    token_ids, reported_acceptance = None, ()

    def step(self, state: np.ndarray, heads: Sequence[int]) -> HeadScores:
        return head_scores(LOGITS[list(heads)])


@pytest.mark.parametrize("seed", range(8))
def test_each_head_takes_part_in_the_race_of_its_own_position(seed: int) -> None:
    network: Any = Heads()
    drafter = MedusaDrafter(network)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), PROMPT)
    drafter.begin(PROMPT, sampler)
    assert len(drafter.propose(3, Budget(3, 4, branches=False))) == 1  # no state is known yet
    out = Forward(np.zeros((1, VOCAB), np.float32), np.ones((1, 4), np.float32))
    drafter.observe(TokenTree.chain(3), out, Verdict((4,), (), False))
    sampler.observe((4,))
    drafted = drafter.propose(4, Budget(3, 4, branches=False)).tokens[1:].tolist()
    for at, token in enumerate(drafted):
        assert token == sampler.preference(LOGITS[at], drafted[:at]).argmax()
    assert len(drafted) == 3


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_no_choice_can_be_made_by_are_refused(wrong: float) -> None:
    logits = LOGITS[0].copy()
    logits[3] = wrong
    with pytest.raises(ValueError, match="not finite"):
        RowScores(logits).ranked()


def test_likeliest_tokens_are_the_same_whoever_looked_for_them() -> None:
    ids = np.arange(VOCAB) * 2 + 1
    found = head_scores(LOGITS[:1])
    told = RowScores(LOGITS[0], ids, found.likeliest[0], found.shares[0])
    assert told.ranked() == RowScores(LOGITS[0], ids).ranked()
    assert [token for token, _ in told.ranked()] == ids[np.argsort(-LOGITS[0])[:4]].tolist()
    spread = told.spread(2 * VOCAB + 1)
    assert np.isneginf(spread[::2]).all() and spread[1::2].tolist() == LOGITS[0].tolist()
