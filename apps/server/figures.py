"""Figures of an answer: timings as llama.cpp's server names them, and ours; tokens and log
probabilities as OpenAI's two endpoints write them.

The listed tokens are those of the text, so that a stream tells what the whole reply does: an end
token is counted in `usage` and not listed. Special tokens have their names and no bytes. The token
that was chosen is among its alternatives; one that a stop string cuts is listed up to there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from edge_spec import GenerationResult, Token
from edge_spec.engine.results import Alternative


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


_NEVER = -9999.0  # OpenAI's for a probability of 0, whose logarithm JSON cannot write


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    content = []
    for token in _listed(tokens):
        tops = [_entry(each) for each in _alternatives(token)]
        content.append(_entry(_own(token)) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """offset: of the first token in the text, in characters."""
    names, offsets, tops = [], [], []
    for token in _listed(tokens):
        offsets.append(offset)
        offset += len(token.text)
        listed = _alternatives(token)
        name_of = _names([_own(token), *listed])
        names.append(name_of[token.id])
        tops.append({name_of[each.id]: _finite(each.logprob) for each in listed})
    return {
        "tokens": names,
        "token_logprobs": [_finite(token.logprob) for token in _listed(tokens)],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def _listed(tokens: Sequence[Token]) -> Iterator[Token]:
    return (token for token in tokens if not token.ends)


def _own(token: Token) -> Alternative:
    return Alternative(token.id, token.name, token.logprob or 0.0, token.raw)


def _alternatives(token: Token) -> list[Alternative]:
    if not token.alternatives:
        return []
    listed = [_own(token) if each.id == token.id else each for each in token.alternatives]
    return listed if any(each.id == token.id for each in listed) else [*listed, _own(token)]


def _names(tokens: Sequence[Alternative]) -> dict[int, str]:
    """Returns by id the names that tell tokens apart: of several with one text, such as a letter
    and the byte that stands for it, the first has it, and another is written as bytes or by id."""
    names: dict[int, str] = {}
    for token in tokens:
        in_bytes = [] if token.raw is None else [_in_bytes(token.raw)]
        choices = (_written(token), *in_bytes, f"token_id:{token.id}")
        taken = [name for id, name in names.items() if id != token.id]
        names[token.id] = next(name for name in choices if name not in taken)
    return names


def _written(token: Alternative) -> str:
    """A part of a character is "bytes:\\xf0\\x9f" there."""
    if token.raw is None or _is_text(token.raw):
        return token.text
    return _in_bytes(token.raw)


def _in_bytes(raw: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _entry(token: Alternative) -> dict[str, Any]:
    raw = list(token.raw or b"")
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": raw}


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)
