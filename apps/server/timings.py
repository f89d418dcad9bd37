"""Figures of an answer under the names that llama.cpp's server gives them, and ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from edge_spec import GenerationResult


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Returns the timings of one answer, or of all choices of a reply: sums, and rates over the
    sums."""
    all_stats = [result.stats for result in results]
    cache_n = sum(stats.cached_n for stats in all_stats)
    prompt_n = sum(stats.prompt_n for stats in all_stats) - cache_n
    prompt_ms = sum(stats.prompt_ms for stats in all_stats)
    predicted_n = sum(stats.predicted_n for stats in all_stats)
    written_n = predicted_n + sum(stats.stop_n for stats in all_stats)
    predicted_ms = sum(stats.predicted_ms for stats in all_stats)
    draft_n = sum(stats.draft_n for stats in all_stats)
    draft_n_accepted = sum(stats.draft_n_accepted for stats in all_stats)
    rounds = sum(stats.rounds for stats in all_stats)
    histogram: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for stats in all_stats:
        histogram.update(stats.acceptance_histogram)
        reasons.update(stats.plain_reasons)
    predicted_per_second = _ratio(predicted_n * 1e3, predicted_ms)
    plain_per_second = next(filter(None, (s.plain_per_second for s in reversed(all_stats))), None)
    speedup = None
    if predicted_ms and written_n and plain_per_second:
        speedup = written_n / predicted_ms * 1e3 / plain_per_second
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": predicted_per_second,
        "draft_n": draft_n,
        "draft_n_accepted": draft_n_accepted,
        "speedup": speedup,
        "acceptance_rate": draft_n_accepted / draft_n if draft_n else None,
        "mean_accepted_length": written_n / rounds if rounds else None,
        "acceptance_histogram": {str(n): histogram[n] for n in sorted(histogram)},
        "rounds": rounds,
        "plain_rounds": sum(stats.plain_rounds for stats in all_stats),
        "plain_reasons": dict(reasons),
        "lossless": all_stats[0].lossless,
        "ttft_ms": round(all_stats[0].ttft_ms, 3),
    }


def usage(results: Sequence[GenerationResult], choices_a_prompt: int) -> dict[str, Any]:
    """Tokens as OpenAI counts them: each prompt once, however many choices it has."""
    first = [result.stats for result in results[::choices_a_prompt]]
    prompt_n = sum(stats.prompt_n for stats in first)
    predicted_n = sum(result.stats.predicted_n for result in results)
    counts = [result.prediction for result in results if result.prediction is not None]
    details = {}
    if counts:
        details["accepted_prediction_tokens"] = sum(each.accepted for each in counts)
        details["rejected_prediction_tokens"] = sum(each.rejected for each in counts)
    if reasoning_n := sum(result.reasoning_n for result in results):
        details["reasoning_tokens"] = reasoning_n
    return {
        "prompt_tokens": prompt_n,
        "completion_tokens": predicted_n,
        "total_tokens": prompt_n + predicted_n,
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_n for stats in first)},
        **({"completion_tokens_details": details} if details else {}),
    }


def _ratio(dividend: float, divisor: float) -> float:
    return round(dividend / divisor, 3) if divisor else 0.0
