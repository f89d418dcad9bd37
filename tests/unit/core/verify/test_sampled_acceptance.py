"""How many sampled draft tokens are accepted, over all outcomes, against the papers' formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import Siblings
from edge_spec.core.verify.siblings import _smallest_rho
from fixtures import sampled_outcomes as outcomes
from fixtures.axes import pairwise

Context = tuple[int, ...]

WITHOUT, WITH, K_SEQ = Siblings
ALL_TOKENS = SamplingParams(temperature=1.0)
ROUNDING = 1e-12  # of sums of up to some 10,000 products of float64 numbers below 1
SEEDS = range(3)  # of the target's and the draft's probabilities
SHAPES: list[tuple[str, ...]] = [("s", "s", "s", "s"), ("ss", "s"), ("sss",)]


def accepted(case: Any, shape: Sequence[str], rule: Siblings = WITHOUT) -> float:
    """On average."""
    return float(case.accepted(outcomes.SampledDraft(case.draft_probs, shape, rule)))


def both(case: Any, path: Context = ()) -> tuple[np.ndarray, np.ndarray]:
    """The target's and the draft's probabilities after a path."""
    context = (*outcomes.PROMPT, *path)
    return case.target_probs(context), case.draft_probs(context)


@pytest.mark.parametrize(
    ("shape", "rule", "temperature"), pairwise(SHAPES, list(Siblings), [0.5, 1.0, 2.0])
)
def test_a_draft_equal_to_the_target_is_always_right(
    shape: tuple[str, ...], rule: Siblings, temperature: float
) -> None:
    case = outcomes.Case("equal", SamplingParams(temperature=temperature, top_p=0.95), vocab=3)
    # rho is found to 1e-6: two or three samples are all refused with a chance of 1e-12 or less.
    loss = 1e-11 if rule is K_SEQ else ROUNDING
    assert accepted(case, shape, rule) == pytest.approx(len(shape), abs=loss)


@pytest.mark.parametrize("rule", Siblings)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_of_other_tokens_is_never_right(shape: tuple[str, ...], rule: Siblings) -> None:
    case = outcomes.Case("disjoint", SamplingParams(temperature=1.0, top_k=1), vocab=3)
    assert accepted(case, shape, rule) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", ["opposed", "smaller"])
def test_one_draft_token_is_accepted_as_far_as_both_agree(draft: str, seed: int) -> None:
    """Leviathan et al. 2023, theorem 3.5: the sum of the smaller of the two probabilities."""
    case = outcomes.Case(draft, ALL_TOKENS, 5, seed)
    p, q = both(case)
    for rule in Siblings:
        assert accepted(case, ("s",), rule) == pytest.approx(np.minimum(p, q).sum(), abs=ROUNDING)


def token_wise(case: Any, length: int, path: Context = ()) -> float:
    """How many draft tokens are accepted one by one (Leviathan et al. 2023)."""
    if length == 0:
        return 0.0
    common = np.minimum(*both(case, path))
    return sum(
        float(mass) * (1 + token_wise(case, length - 1, (*path, token)))
        for token, mass in enumerate(common)
    )


def in_a_block(case: Any, length: int, path: Context = (), weight: float = 1.0) -> float:
    """The same for a block: its first i draft tokens are accepted with the chance weights[i] (Sun
    et al. 2024, lemma 3)."""
    if length == 0:
        return 0.0
    p, q = both(case, path)
    total = 0.0
    for token in np.flatnonzero(q):
        below = min(1.0, weight * p[token] / q[token])
        rest = in_a_block(case, length - 1, (*path, int(token)), below)
        total += float(q[token]) * (below + rest)
    return total


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", ["opposed", "smaller", "nucleus"])
def test_a_block_accepts_more_than_its_tokens_one_by_one(draft: str, seed: int) -> None:
    case = outcomes.Case(draft, ALL_TOKENS, 3, seed)
    found = accepted(case, ("s", "s", "s"))
    assert found == pytest.approx(in_a_block(case, 3), abs=ROUNDING)
    assert found >= token_wise(case, 3) - ROUNDING
    if draft == "opposed":  # with all tokens in both there is always something to gain
        assert found > token_wise(case, 3) + 1e-4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", ["opposed", "smaller"])
def test_no_sibling_is_wasted_on_a_token_that_was_rejected(draft: str, seed: int) -> None:
    case = outcomes.Case(draft, ALL_TOKENS, 4, seed)
    for k in (2, 3):
        shape = ("s" * k,)
        assert accepted(case, shape, WITHOUT) >= accepted(case, shape, WITH) - ROUNDING
        assert accepted(case, shape, WITHOUT) >= accepted(case, ("s" * (k - 1),)) - ROUNDING


@pytest.mark.parametrize("params", [ALL_TOKENS, SamplingParams(temperature=2.0, top_k=3)])
def test_siblings_that_cover_the_draft_cover_the_target(params: SamplingParams) -> None:
    case = outcomes.Case("opposed", params, 4)
    assert accepted(case, ("ssss",), WITHOUT) == pytest.approx(1, abs=ROUNDING)
    assert accepted(case, ("ssss",), WITH) < 0.99


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draft", ["opposed", "smaller"])
@pytest.mark.parametrize("k", [2, 3])
def test_k_seq_accepts_as_its_paper_says(k: int, draft: str, seed: int) -> None:
    """Sun et al. 2023, theorem 2: with 1 - (1 - beta)^k; rho solves that = rho * beta."""
    case = outcomes.Case(draft, ALL_TOKENS, 4, seed)
    p, q = both(case)
    rho = _smallest_rho(p[q > 0], q[q > 0], k)
    beta = np.minimum(q, p / rho).sum()
    found = accepted(case, ("s" * k,), K_SEQ)
    assert found == pytest.approx(1 - (1 - beta) ** k, abs=ROUNDING)
    assert found == pytest.approx(rho * beta, abs=1e-5)  # rho is found to a millionth
    assert 1 <= rho <= k


@pytest.mark.parametrize("certain", [("c",), ("cc",)])
def test_certain_draft_tokens_are_accepted_as_likely_as_they_are(certain: tuple[str, ...]) -> None:
    case = outcomes.Case("opposed", ALL_TOKENS, 4)
    p, q = both(case)
    draft_tokens = [(int(q.argmin()) + i) % 4 for i in range(len(certain[0]))]
    assert accepted(case, certain) == pytest.approx(sum(p[draft_tokens]), abs=ROUNDING)
