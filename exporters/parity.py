"""Measure how far a converted model is from its source, on the same packaged text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Model, Progress, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ExportError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.models import runtimes
from edge_spec.text.tokenizer import Tokenizer

_CHUNK_ROWS = 32
_MIN_TOKENS = 16
# Parameters times tokens: about six seconds of the reference on two cores.
_MAX_WORK = 2.5e11
_MIN_CHECKED = 64


class Parity(NamedTuple):
    """kl_divergence: mean over positions of KL(source || converted), in nats."""

    max_logit_difference: float
    kl_divergence: float
    source_perplexity: float
    perplexity: float


OnChunk = Callable[[float], None]  # called with the share done
Compare = Callable[[Any], Parity]  # called with the written model, as its runtime opens it
# From a written model and tokens: logits [tokens - 1, vocab] float32.
Score = Callable[[Any, Sequence[int], OnChunk], np.ndarray]


def against_reference(
    checkpoint: StoredCheckpoint,
    score: Score,
    max_kl_divergence: float,
    progress: Progress,
    remedy: str = "Use more bits (--quant int8 or fp16).",
    num_tokens: int | None = None,
) -> Compare:
    """Return a function that compares a written model with the reference on the packaged text, or
    its first `num_tokens`. It raises ExportError beyond the bound, or if the tokenizer makes too
    few tokens."""
    most = _num_tokens(checkpoint.config) if num_tokens is None else num_tokens

    def part(start: float) -> OnChunk:
        return lambda done: progress("Comparing with the reference", start + done / 2)

    def compared(written: Any) -> Parity:
        longest = written.config.context_length  # an export may shorten it
        tokens = parity_tokens(checkpoint.path, checkpoint.tokenizer_json())
        tokens = tokens[: min(most, longest)]
        source = source_scores(checkpoint, tokens, part(0.0))
        parity = compare(source, score(written, tokens, part(0.5)), tokens)
        return require_near(checkpoint.path, parity, max_kl_divergence, remedy)

    return compared


def scores_by(
    runtime: str,
    source: Any,
    tokens: Sequence[int],
    on_chunk: OnChunk,
    chunk_rows: Sequence[int] = (_CHUNK_ROWS,),
) -> np.ndarray:
    """Score a text with a runtime. source: what it opens."""
    model = runtimes.load_runtime(runtime).open(source, RuntimeOptions())
    try:
        return score_text(model, tokens, on_chunk, chunk_rows)
    finally:
        model.close()


def source_scores(
    checkpoint: StoredCheckpoint, tokens: Sequence[int], on_layer: Callable[[float], None]
) -> np.ndarray:
    """Return the reference's logits, [tokens - 1, vocab] float32, with one matrix in memory (all of
    an encoder-decoder)."""
    if checkpoint.config.encoder is not None:
        return scores_by("reference", checkpoint, tokens, on_layer)
    stream = runtimes.load_layer_stream(checkpoint, [tokens[:-1]])
    num_layers = checkpoint.config.num_layers
    for layer in range(num_layers):
        stream.advance()
        checkpoint.release_pages()
        on_layer((layer + 1) / num_layers)
    scores = stream.logits(np.arange(len(tokens) - 1))
    checkpoint.release_pages()
    return scores


def _num_tokens(config: ModelConfig) -> int:
    """Return how many tokens to score: all up to half a billion parameters."""
    most = max(_MIN_CHECKED, int(_MAX_WORK / config.num_parameters))
    room = config.context_length if config.encoder is None else config.context_length // 2
    return min(most, room)


def require_near(path: Path, parity: Parity, max_kl_divergence: float, remedy: str) -> Parity:
    """Raise ExportError beyond the bound."""
    if not parity.kl_divergence <= max_kl_divergence:  # also true for NaN
        raise ExportError(
            f"the exported model is too far from {path}: KL divergence "
            f"{parity.kl_divergence:.4f}, allowed {max_kl_divergence}",
            remedy=remedy,
        )
    return parity


def parity_tokens(path: Path, tokenizer_json: str) -> list[int]:
    """Tokenize the packaged text. Raises ExportError for too few tokens."""
    tokens = Tokenizer(tokenizer_json).encode(parity_text())
    if len(tokens) < _MIN_TOKENS:
        raise ExportError(
            f"the tokenizer of {path} makes {len(tokens)} tokens of the test text",
            remedy="Check the model's tokenizer.",
        )
    return tokens


def parity_text() -> str:
    """Return about 500 tokens of prose, dialogue, arithmetic and code."""
    return (files("edge_spec.exporters") / "parity.txt").read_text(encoding="utf-8")


def score_text(
    model: Model,
    tokens: Sequence[int],
    on_chunk: OnChunk = lambda done: None,
    chunk_rows: Sequence[int] = (_CHUNK_ROWS,),
) -> np.ndarray:
    """Return logits [tokens - 1, vocab] float32; row i scores token i + 1. chunk_rows: rows per
    pass, in turns. For an encoder-decoder, the text is also the source."""
    session = model.open_session()
    count = len(tokens) - 1
    scores = np.empty((count, model.config.vocab_size), np.float32)
    turns = cycle(chunk_rows)
    start = 0
    try:
        if model.config.encoder is not None:
            session.prefill(tokens[:count])
        while start < count:
            end = min(start + min(next(turns), model.capabilities.max_rows), count)
            chunk = TokenTree.chain(tokens[start], tokens[start + 1 : end])
            scores[start:end] = session.forward(chunk).logits
            session.commit(range(len(chunk)))
            on_chunk(end / count)
            start = end
    finally:
        session.close()
    return scores


def compare(source: np.ndarray, converted: np.ndarray, tokens: Sequence[int]) -> Parity:
    """Compare logits [tokens - 1, vocab] of the same tokens."""
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
