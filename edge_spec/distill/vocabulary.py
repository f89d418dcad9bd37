"""Chooses the tokens that a drafter scores: those that the target writes most (Zhao et al. 2025,
FR-Spec)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from edge_spec.distill.conversations import Conversation


def most_written(
    conversations: Iterable[Conversation], vocab_size: int, count: int, always: Sequence[int] = ()
) -> np.ndarray:
    """[at most count] int64, ascending: the tokens that answers have most often, then those of
    prompts. always: tokens that are among them, such as the end of a text."""
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for each in conversations:
        answers += np.bincount(each.tokens[each.start :], minlength=vocab_size)
        prompts += np.bincount(each.tokens[: each.start], minlength=vocab_size)
    counts = answers * (1 + int(prompts.sum())) + prompts
    counts[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")[:count]
    found: np.ndarray = np.sort(order[counts[order] > 0])
    return found


def with_others(token_ids: np.ndarray, vocab_size: int, count: int, seed: int) -> np.ndarray:
    """[at most count more] int64, ascending: these tokens and some that are drawn of all others. A
    drafter that drafts from the whole vocabulary learns from them that they are seldom written
    (cf. sampled softmax, Jean et al. 2015)."""
    others = np.setdiff1d(np.arange(vocab_size), token_ids)
    drawn = np.random.default_rng(seed).permutation(others)[:count]
    found: np.ndarray = np.sort(np.concatenate([token_ids, drawn]))
    return found


def coverage(conversations: Iterable[Conversation], token_ids: np.ndarray) -> float:
    """Returns the share of answers' tokens that are among these."""
    answers = np.concatenate([each.tokens[each.start :] for each in conversations])
    return float(np.isin(answers, token_ids).mean())
