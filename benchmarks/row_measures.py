"""What benchmarks/row_kernels.py measures of models that are open, in turns, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from llama_loop import LlamaLoop

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_CHECKED_ROWS = 64  # whose bits are compared, in each way of dividing them into passes

Sides = dict[str, LlamaLoop]


def measure_widths(sides: Sides, tokens: Sequence[int], context: int, repetitions: int) -> Any:
    """Returns the milliseconds of a pass of each width after `context` tokens, of each side."""
    seconds: dict[str, dict[int, list[float]]] = {
        side: {width: [] for width in WIDTHS} for side in sides
    }
    for loop in sides.values():
        loop.truncate(0)
        loop.forward(tokens[:context], all_rows=False)
    for repetition in range(repetitions + 1):
        order = list(sides.items())[:: 1 if repetition % 2 else -1]
        for width in WIDTHS:
            for side, loop in order:
                taken = loop.forward(tokens[context : context + width])
                loop.truncate(context)
                if repetition:  # the first passes reserve their buffers
                    seconds[side][width].append(taken)
    return {
        side: {width: 1e3 * median(all_s) for width, all_s in widths.items()}
        for side, widths in seconds.items()
    }


def measure_prompt(sides: Sides, tokens: Sequence[int], length: int, repetitions: int) -> Any:
    """Returns the tokens a second with which a prompt is read, of each side."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repetitions):
        for side, loop in sides.items():
            loop.truncate(0)
            seconds[side].append(loop.forward(tokens[:length], all_rows=False))
    return {side: length / median(all_s) for side, all_s in seconds.items()}


def compare_bits(loop: LlamaLoop, tokens: Sequence[int], context: int, threads: int) -> Any:
    """Returns how many rows differ from those of single rows in passes of each width, in random
    divisions with rows beside them that are taken back, and with other numbers of threads; and
    the largest difference of a logit. Of the library's own kernels fewer divisions are looked at:
    some rows differ, as they should."""
    loop.truncate(0)
    loop.forward(tokens[:context], all_rows=False)
    rows = tokens[context : context + _CHECKED_ROWS]
    single = np.concatenate([_scored(loop, [row]) for row in rows])
    random = np.random.default_rng(0)
    widths = range(2, 17) if loop.ours else (2, 4, 8, 16)
    divisions = {f"{width} rows": [width] * _CHECKED_ROWS for width in widths}
    for trial in range(3 if loop.ours else 1):
        divisions[f"random {trial + 1}"] = random.integers(1, 17, _CHECKED_ROWS).tolist()
    found = {name: _differing(loop, context, rows, single, d) for name, d in divisions.items()}
    for number in sorted({1, 2, 3, 4} - {threads} if loop.ours else ()):
        loop.set_threads(number)
        name = f"random, {number} threads"
        found[name] = _differing(loop, context, rows, single, divisions["random 1"])
    loop.set_threads(threads)
    return found


def _scored(loop: LlamaLoop, rows: Sequence[int]) -> np.ndarray:
    loop.forward(rows)
    return loop.logits(len(rows))


def _differing(
    loop: LlamaLoop,
    context: int,
    rows: Sequence[int],
    single: np.ndarray,
    widths: Sequence[int],
) -> tuple[int, float]:
    loop.truncate(context)
    differing, largest, start = 0, 0.0, 0
    for width in widths:
        own = rows[start : start + width]
        if not own:
            break
        beside = [rows[0]] * ((start * 7 + width) % (17 - width))  # any number, any tokens
        scored = _scored(loop, [*own, *beside])[: len(own)]
        expected = single[start : start + len(own)]
        unequal = (scored.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
        differing += int(unequal.sum())
        largest = max(largest, float(np.abs(scored - expected).max()))
        start += len(own)
        loop.truncate(context + start)
    return differing, largest


def compare_perplexity(sides: Sides, tokens: Sequence[int]) -> Any:
    """Returns the perplexity of each side; by how much ours is larger, with the standard error of
    that; and how far the rows of both are apart at most, in the logits' standard deviations."""
    losses: dict[str, list[float]] = {side: [] for side in sides}
    apart: list[float] = []
    for loop in sides.values():
        loop.truncate(0)
    for start in range(0, len(tokens) - 1, 256):
        chunk = tokens[start : start + 256]
        following = tokens[start + 1 : start + 1 + len(chunk)]
        scored = {side: _scored(loop, chunk)[: len(following)] for side, loop in sides.items()}
        for side, logits in scored.items():
            losses[side].extend(_losses(logits, following))
        if len(scored) == 2:
            one, other = scored.values()
            apart.extend((np.abs(one - other).max(axis=1) / one.std(axis=1)).tolist())
    found = {
        "tokens": len(tokens),
        "perplexity": {side: float(np.exp(np.mean(all_))) for side, all_ in losses.items()},
    }
    if apart:
        more = np.subtract(losses["ours"], losses["llama.cpp"])
        found["more"] = float(np.expm1(more.mean()))
        found["more_error"] = float(more.std() / np.sqrt(len(more)))
        found["apart"] = {"median": median(apart), "largest": max(apart)}
    return found


def compare_with_float32(sides: Sides, reference: LlamaLoop, tokens: Sequence[int]) -> Any:
    """Returns how far each side is from the same weights in float32, whose activations are not
    rounded: the mean Kullback-Leibler divergence of a row's distribution in nats, and its standard
    error."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for loop in (reference, *sides.values()):
        loop.truncate(0)
    for start in range(0, len(tokens), 128):
        chunk = tokens[start : start + 128]
        expected = _log_probs(_scored(reference, chunk))
        for side, loop in sides.items():
            apart = expected - _log_probs(_scored(loop, chunk))
            found[side].extend((np.exp(expected) * apart).sum(axis=1).tolist())
    return {
        side: (float(np.mean(all_)), float(np.std(all_) / np.sqrt(len(all_))))
        for side, all_ in found.items()
    }


def _log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _losses(logits: np.ndarray, following: Sequence[int]) -> list[float]:
    highest = logits.max(axis=1, keepdims=True)
    sums = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64))
    losses: list[float] = (
        sums + highest[:, 0] - logits[np.arange(len(following)), following]
    ).tolist()
    return losses
