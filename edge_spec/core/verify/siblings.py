"""Verification of a row's children that were sampled from one distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import Siblings, TokenTree

_K_SEQ_STEPS = 20  # halvings of rho's interval: a millionth is as good as exact


def verify_siblings(
    tree: TokenTree, row: int, out: Forward, sampler: Sampler, path: Sequence[int]
) -> tuple[list[int], int | None]:
    """Return the accepted child of `row` in a list, or the token in its place. path: tokens between
    the output and the children."""
    children = tree.children(row)
    target_probs = sampler.probs(out.logits[row], path)
    if tree.siblings is Siblings.K_SEQ:
        certain = [child for child in children if tree.draft_probs[child] is None]
        child, left = _one_by_one(tree, certain, target_probs, sampler)
        if child is None:
            sampled = [child for child in children if tree.draft_probs[child] is not None]
            child, left = _k_seq(tree, sampled, left, sampler)
    else:
        child, left = _one_by_one(tree, children, target_probs, sampler)
    if child is not None:
        return [child], None
    return [], sampler.draw(left, Purpose.RECOVERY)


def _one_by_one(
    tree: TokenTree, children: Sequence[int], target_probs: np.ndarray, sampler: Sampler
) -> tuple[int | None, np.ndarray]:
    """Return the accepted child, and what is left of the target's distribution to draw another
    token from.

    Each child is tested against what is left by earlier ones. Without replacement (Chen et al.
    2024, Sequoia, algorithm 2), a rejected child cannot be drawn again; with replacement (Miao et
    al. 2024, SpecInfer) it can. An unsampled child has all mass of its draft distribution, so
    nothing is left of the target's there.
    """
    left, draft_probs = target_probs, None
    for child in children:
        token = int(tree.tokens[child])
        sampled_from = tree.draft_probs[child]
        if sampled_from is None:
            if sampler.uniform(Purpose.ACCEPTANCE) < left[token]:
                return child, left
            left = _without(left, token)
            continue
        if draft_probs is None:
            draft_probs = sampled_from
        if draft_probs[token] <= 0:
            continue  # nothing was left to sample from
        if sampler.uniform(Purpose.ACCEPTANCE) * draft_probs[token] < left[token]:
            return child, left
        left = _difference(left, draft_probs)
        if tree.siblings is Siblings.WITHOUT_REPLACEMENT:
            draft_probs = _without(draft_probs, token)
    return None, left


def _k_seq(
    tree: TokenTree, children: Sequence[int], target_probs: np.ndarray, sampler: Sampler
) -> tuple[int | None, np.ndarray]:
    """Accept each of k independent samples of q with min(1, p / (rho * q)), rho being the smallest
    that leaves a distribution (Sun et al. 2023, SpecTr, section 5).

    With beta the probability to accept one sample, and a = 1 - (1 - beta)^k to accept any, p -
    min(q, p / rho) * a / beta is left, nonnegative while a <= rho * beta.
    """
    draft_probs = tree.draft_probs[children[0]]
    assert draft_probs is not None
    k = len(children)
    common = np.flatnonzero((draft_probs > 0) & (target_probs > 0))
    if not len(common):
        return None, target_probs
    p, q = target_probs[common], draft_probs[common]
    rho = _smallest_rho(p, q, k)
    for child in children:
        token = int(tree.tokens[child])
        bound = target_probs[token] if draft_probs[token] > 0 else 0.0
        if sampler.uniform(Purpose.ACCEPTANCE) * rho * draft_probs[token] < bound:
            return child, target_probs
    once = np.minimum(q, p / rho)
    beta = float(once.sum())
    taken = np.zeros_like(target_probs)
    taken[common] = once * ((1 - (1 - beta) ** k) / beta)
    return None, _difference(target_probs, taken)


def _smallest_rho(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Return rho, at most a millionth of k too large. p, q: [tokens], nowhere 0."""
    low, high = 1.0, float(k)
    for _ in range(_K_SEQ_STEPS):
        middle = (low + high) / 2
        beta = float(np.minimum(q, p / middle).sum())
        if 1 - (1 - beta) ** k <= middle * beta:
            high = middle
        else:
            low = middle
    return high


def _difference(probabilities: np.ndarray, taken: np.ndarray) -> np.ndarray:
    left = probabilities - taken
    np.maximum(left, 0, out=left)
    mass = left.sum()
    return left / mass if mass > 0 else probabilities


def _without(probabilities: np.ndarray, token: int) -> np.ndarray:
    """Condition on not being `token`; all 0 if nothing else is possible."""
    left = probabilities.copy()
    left[token] = 0
    mass = left.sum()
    return left / mass if mass > 0 else left
