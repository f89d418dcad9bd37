"""How far a converted model is from its source: both score the same packaged text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from edge_spec.model import Model
from edge_spec.tree import TokenTree

_CHUNK_ROWS = 32


class Parity(NamedTuple):
    """`kl_divergence` is the mean over positions of KL(source || converted), in nats."""

    max_logit_difference: float
    kl_divergence: float
    source_perplexity: float
    perplexity: float


def parity_text() -> str:
    """About 500 tokens of prose, dialogue, arithmetic and code."""
    return (files("edge_spec.exporters") / "parity.txt").read_text(encoding="utf-8")


def score_text(
    model: Model, tokens: Sequence[int], on_chunk: Callable[[float], None] = lambda done: None
) -> np.ndarray:
    """logits [tokens - 1, vocab] float32: row i scores token i + 1."""
    session = model.open_session()
    rows = min(_CHUNK_ROWS, model.capabilities.max_rows)
    count = len(tokens) - 1
    scores = np.empty((count, model.config.vocab_size), np.float32)
    try:
        for start in range(0, count, rows):
            end = min(start + rows, count)
            chunk = TokenTree.chain(tokens[start], tokens[start + 1 : end])
            scores[start:end] = session.forward(chunk).logits
            session.commit(range(len(chunk)))
            on_chunk(end / count)
    finally:
        session.close()
    return scores


def compare(source: np.ndarray, converted: np.ndarray, tokens: Sequence[int]) -> Parity:
    """source, converted: [tokens - 1, vocab] logits of `score_text` for the same tokens."""
    largest = 0.0
    divergence, source_loss, loss = [], [], []
    for before, after, token in zip(source, converted, tokens[1:], strict=True):
        largest = max(largest, float(np.abs(before - after).max()))
        expected, got = _log_softmax(before), _log_softmax(after)
        divergence.append(float(np.exp(expected) @ (expected - got)))
        source_loss.append(-expected[token])
        loss.append(-got[token])
    return Parity(
        max_logit_difference=largest,
        kl_divergence=float(np.mean(divergence)),
        source_perplexity=float(np.exp(np.mean(source_loss))),
        perplexity=float(np.exp(np.mean(loss))),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result
