"""Text written with sampled draft tokens has the target's distribution: drawn with the sampler's
own random numbers, round after round.

That each rule is exact if its numbers are independent is in test_sampled_exact.py; here they are
what a seed makes of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_spec.core import sampling
from edge_spec.core.model import Forward
from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import Siblings, TokenTree, Verdict
from edge_spec.core.verify import verify
from fixtures import sampled_outcomes as outcomes
from fixtures import text_distribution as text

Context = tuple[int, ...]
Rule = Callable[[TokenTree, Forward, Sampler], Verdict]

DRAWS = 50_000
ROUNDS_A_SEED = 500
# 4^3 texts: a shift of 1 % of the mass between two texts of 1/64 adds 50,000 * (0.01^2 * 64) * 2 =
# 640 to the statistic, whose standard deviation is sqrt(2 * 63) = 11; one of 0.25 % adds 40. Small
# shifts of every text are for test_sampled_exact.py. A right rule fails with a chance of 1e-6.


PROMPT, LENGTH = outcomes.PROMPT, text.LENGTH


@pytest.fixture(autouse=True)
def remembered_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "target_probs", text.remembering(sampling.target_probs))
    monkeypatch.setattr(sampling, "_kept", text.remembering(sampling._kept))


def p_value(
    shape: tuple[str, ...],
    siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
    make: Callable[..., Sampler] = Sampler,
    draws: int = DRAWS,
) -> float:
    """Of LENGTH tokens after the prompt, in as many rounds as they take."""
    case = outcomes.Case("opposed", SamplingParams(temperature=1.0), vocab=4)
    draft = outcomes.SampledDraft(case.draft_probs, shape, siblings)
    counts: Counter[Context] = Counter()
    for draw in range(draws):
        if draw % ROUNDS_A_SEED == 0:
            sampler = make(SamplingParams(temperature=1.0, seed=draw), PROMPT)
        context: Context = PROMPT
        while len(context) < len(PROMPT) + LENGTH:
            tree = draft.tree(context, sampler)
            verdict = verify(tree, case.scores.forward(context, tree), sampler)
            sampler.observe(verdict.tokens)
            context += verdict.tokens
        counts[context[len(PROMPT) :][:LENGTH]] += 1
    return float(text.p_value(counts, text.joint(case.scores.next_logits, PROMPT, case.params)))


# With which numbers a tree is verified depends on chains, on siblings and on the rule for these:
# what is small enough to be seen only in ten times the draws is looked for in one tree of each.
WITH_ALL_DRAWS = [
    (("s", "s", "s"), Siblings.WITHOUT_REPLACEMENT),
    (("scs",), Siblings.WITHOUT_REPLACEMENT),
    (("ss", "s"), Siblings.WITHOUT_REPLACEMENT),
    (("ss", "s"), Siblings.WITH_REPLACEMENT),
    (("ss", "s"), Siblings.K_SEQ),
]
OTHER_TREES = [
    (("s",), Siblings.WITHOUT_REPLACEMENT),
    (("s", "c"), Siblings.WITHOUT_REPLACEMENT),
    (("c", "s"), Siblings.WITHOUT_REPLACEMENT),
    (("sss",), Siblings.WITHOUT_REPLACEMENT),
]


@pytest.mark.parametrize(
    ("shape", "siblings", "draws"),
    [
        *((*tree, DRAWS // 10) for tree in WITH_ALL_DRAWS),
        *(pytest.param(*tree, DRAWS, marks=pytest.mark.slow) for tree in WITH_ALL_DRAWS),
        *(pytest.param(*tree, DRAWS // 10, marks=pytest.mark.slow) for tree in OTHER_TREES),
    ],
)
def test_the_first_tokens_have_the_targets_joint_distribution(
    shape: tuple[str, ...], siblings: Siblings, draws: int
) -> None:
    assert p_value(shape, siblings, draws=draws) > text.SMALLEST_P


class OneStream(Sampler):
    """Broken: whether a draft token is accepted and what replaces it depend on one number."""

    last = 0.0

    def uniform(self, purpose: Purpose) -> float:
        if purpose is not Purpose.RECOVERY:
            self.last = super().uniform(purpose)
        return self.last


class OneSeed(Sampler):
    """Broken: draft tokens and their acceptance have streams of the same numbers."""

    def uniform(self, purpose: Purpose) -> float:
        if purpose not in self._streams:
            self._streams[purpose] = np.random.default_rng(self.seed)
        return float(self._streams[purpose].random())


class OneDraw(Sampler):
    """Broken: a text's numbers are used again for the next text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers = [super(OneDraw, self).uniform(Purpose.DRAFT) for _ in range(40)]
        self._used = 0

    def uniform(self, purpose: Purpose) -> float:
        self._used += 1
        return self._numbers[self._used % 40]


@pytest.mark.parametrize("broken", [OneStream, OneSeed, OneDraw])
def test_shared_random_numbers_fail_the_same_check(broken: Any) -> None:
    assert p_value(("s",), make=broken, draws=DRAWS // 10) < text.SMALLEST_P
