"""Rules that change what is written fail the check of test_sampled_exact.py.

The first part breaks verification, the second the conditions under which a sampled tree may be
cut: they are what a drafter and a policy have to keep to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler, SamplingParams, TokenChoice
from edge_spec.core.tree import Siblings, TokenTree, Verdict, chain_first, likeliest
from edge_spec.core.verify import siblings, verify
from fixtures import sampled_outcomes as outcomes
from fixtures import text_distribution as text

Context = tuple[int, ...]

ALL_TOKENS = SamplingParams(temperature=1.0)
CHAIN = ("s", "s", "s")
# Right rules are within 1e-12. What breaks a rule here moves some text's probability by more.
SHIFT = 1e-3


def error(shape: Sequence[str], draft: Any = None, params: Any = ALL_TOKENS, **more: Any) -> float:
    """The largest difference of a probability of the text from the target's."""
    vocab = 3 if sum(map(len, shape)) > 3 else 6 if shape == ("ss",) else 4
    case = outcomes.Case("opposed", params, vocab)
    expected = text.joint(case.scores.next_logits, outcomes.PROMPT, params)
    form = {name: more.pop(name) for name in ("siblings", "confidence") if name in more}
    made = (draft or outcomes.SampledDraft)(case.draft_probs, shape, **form)
    return float(text.difference(case.texts(made, **more), expected))


class Argmax:
    """Broken: says to have sampled what it chose because it is likeliest."""

    def __init__(self, probs: Any, shape: Sequence[str]) -> None:
        self._probs = probs
        self._length = len(shape)

    def tree(self, context: Context, sampler: Sampler) -> TokenTree:
        draft_tokens: list[int] = []
        probs: list[np.ndarray] = []
        for _ in range(self._length):
            probs.append(self._probs((*context, *draft_tokens)))
            draft_tokens.append(int(probs[-1].argmax()))
        tree = TokenTree.chain(context[-1], draft_tokens)
        return replace(tree, draft_probs=(None, *probs))


def test_a_chosen_draft_token_is_no_sample() -> None:
    assert error(CHAIN, Argmax) > SHIFT


class _Shared(outcomes.ExploringSampler):  # type: ignore[misc]
    """Broken: a number that was used for `first` is used once more for `second`."""

    first = second = Purpose.ACCEPTANCE

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._used: list[Any] = []

    def uniform(self, purpose: Purpose) -> Any:
        if purpose is self.second and self._used:
            return self._used.pop()
        number = super().uniform(purpose)
        if purpose is self.first:
            self._used.append(number)
        return number


class RecoveryOfAcceptance(_Shared):
    first, second = Purpose.ACCEPTANCE, Purpose.RECOVERY


class AcceptanceOfDraft(_Shared):
    first, second = Purpose.DRAFT, Purpose.ACCEPTANCE


class RecoveryOfDraft(_Shared):
    first, second = Purpose.DRAFT, Purpose.RECOVERY


@pytest.mark.parametrize("sampler", [RecoveryOfAcceptance, AcceptanceOfDraft, RecoveryOfDraft])
@pytest.mark.parametrize("shape", [("s",), CHAIN, ("ss",)])
def test_streams_have_to_be_independent(sampler: Any, shape: tuple[str, ...]) -> None:
    assert error(shape, sampler=sampler) > SHIFT


class UnprocessedBonus(outcomes.ExploringSampler):  # type: ignore[misc]
    """Broken: the token after a chain that is accepted comes from the logits as they are."""

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> TokenChoice:
        weights = np.exp(logits.astype(np.float64))
        return TokenChoice(self.draw(weights, Purpose.POSITION), near_tie=False)


def test_the_bonus_comes_from_the_processed_distribution() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9)
    assert error(("s", "s"), params=params, sampler=UnprocessedBonus) > SHIFT


def with_replacement(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
    """Broken: a child that was rejected stays in the draft's distribution."""
    return verify(replace(tree, siblings=Siblings.WITH_REPLACEMENT), out, sampler)


def test_a_rejected_sibling_cannot_be_drawn_again() -> None:
    assert error(("ss",), rule=with_replacement) > SHIFT


def test_a_residual_has_to_be_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_difference", lambda p, taken: np.maximum(p - taken, 0))
    assert error(("ss",)) > SHIFT


def test_k_seq_has_to_divide_by_rho(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_smallest_rho", lambda p, q, k: 1.0)
    assert error(("ss",), siblings=Siblings.K_SEQ) > SHIFT


@pytest.mark.parametrize("token_wise", [False, True])
def test_a_block_has_a_residual_of_its_own(token_wise: bool) -> None:
    def rule(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
        """Block verification; broken where a wrong draft token is replaced as if it stood alone."""
        draft_tokens = tree.tokens[1:].tolist()
        p = [sampler.probs(out.logits[i], draft_tokens[:i]) for i in range(len(tree))]
        q = [probs for probs in tree.draft_probs if probs is not None]
        weights = [1.0]
        for i, candidate in enumerate(draft_tokens):
            weights.append(min(1.0, weights[i] * p[i][candidate] / q[i][candidate]))
        left = [np.maximum(weights[i] * p[i] - q[i], 0) for i in range(len(draft_tokens))]
        if sampler.uniform(Purpose.ACCEPTANCE) < weights[-1]:
            return Verdict((*draft_tokens, sampler.draw(p[-1], Purpose.RECOVERY)), (), True)
        count = len(draft_tokens) - 1
        while count and not (
            sampler.uniform(Purpose.ACCEPTANCE) * (left[count].sum() + 1 - weights[count])
            < left[count].sum()
        ):
            count -= 1
        residual = np.maximum(p[count] - q[count], 0) if token_wise else left[count]
        return Verdict((*draft_tokens[:count], sampler.draw(residual, Purpose.RECOVERY)), (), False)

    assert (error(CHAIN, rule=rule) > SHIFT) == token_wise


def by_own_token(path: Context, place: int) -> float:
    return 0.2 + 0.3 * path[-1]


def later_is_likelier(path: Context, place: int) -> float:
    return 0.3 * (1 + place)


def by_parent(path: Context, place: int) -> float:
    """Below some tokens so likely that a sibling of theirs has to go."""
    if len(path) < 3:
        return (0.95, 0.95, 0.6)[len(path)] if place == 0 else 0.4
    return 0.9 if path[-2] == 0 else 0.1


def by_parent_alone(path: Context, place: int) -> float:
    return (0.9 if path[-2] == 0 else 0.1) if len(path) > 1 else 0.6


def first_alone_if_least(tree: TokenTree) -> TokenTree:
    return tree.first_rows(2) if tree.tokens[1] == 0 else tree


@pytest.mark.parametrize(
    ("shape", "form", "cut"),
    [
        # A token's own value decides whether it is verified.
        (CHAIN, {"confidence": by_own_token}, lambda tree: likeliest(tree, 10, 0.3)),
        (CHAIN, {"confidence": by_own_token}, lambda tree: chain_first(tree, 10, 0.3)),
        (("ss",), {"confidence": by_own_token}, lambda tree: likeliest(tree, 2)),
        # A child is drawn given those before it: without them it is no sample.
        (("ss",), {"confidence": later_is_likelier}, lambda tree: likeliest(tree, 2)),
        # Which branch is kept depends on what it holds.
        (("ss", "s"), {"confidence": by_parent_alone}, lambda tree: chain_first(tree, 10)),
        # How many children are verified together depends on what the first one holds.
        (("ss",), {"siblings": Siblings.K_SEQ}, first_alone_if_least),
        # A chain goes on through a row whose sibling had to go because of what that row holds.
        (
            ("s", "ss", "s"),
            {"confidence": by_parent},
            lambda tree: replace(likeliest(tree, 4), only_child=()),
        ),
    ],
)
def test_what_a_cut_must_not_depend_on(
    shape: tuple[str, ...], form: Any, cut: Callable[[TokenTree], TokenTree]
) -> None:
    assert error(shape, cut=cut, **form) > SHIFT
    assert error(shape, **form) < SHIFT * 1e-6  # the cut it is
