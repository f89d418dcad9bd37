"""The figures of an answer, as clients of several APIs read them.

The listed tokens are those of the text: an end token is counted in `usage` and not listed. The
token that was chosen is among its alternatives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge_spec import FinishReason, GenerationResult, PartKind, Token
from edge_spec.engine.results import Alternative

_NEVER = -9999.0  # OpenAI's for a probability of 0, whose logarithm JSON cannot write
_SUMMED = (
    *("prompt_n", "cached_n", "prompt_ms", "predicted_n", "stop_n", "predicted_ms"),
    *("draft_n", "draft_n_accepted", "rounds", "plain_rounds"),
)


def timings(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return the timings of all choices of a reply: sums, and rates over the sums."""
    every = [result.stats for result in results]
    stats = replace(
        every[0],
        **{name: sum(getattr(each, name) for each in every) for name in _SUMMED},
        acceptance_histogram=sum((each.acceptance_histogram for each in every), Counter()),
        plain_reasons=sum((each.plain_reasons for each in every), Counter()),
        plain_per_second=next(filter(None, (s.plain_per_second for s in reversed(every))), None),
    )
    read_n = stats.prompt_n - stats.cached_n
    histogram = sorted(stats.acceptance_histogram.items())
    return {
        "cache_n": stats.cached_n,
        "prompt_n": read_n,
        "prompt_ms": round(stats.prompt_ms, 3),
        "prompt_per_token_ms": _ratio(stats.prompt_ms, read_n),
        "prompt_per_second": _ratio(read_n * 1e3, stats.prompt_ms),
        "predicted_n": stats.predicted_n,
        "predicted_ms": round(stats.predicted_ms, 3),
        "predicted_per_token_ms": _ratio(stats.predicted_ms, stats.predicted_n),
        "predicted_per_second": _ratio(stats.predicted_n * 1e3, stats.predicted_ms),
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "speedup": stats.speedup,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_histogram": {str(n): count for n, count in histogram},
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
        "plain_reasons": dict(stats.plain_reasons),
        "lossless": stats.lossless,
        "ttft_ms": round(stats.ttft_ms, 3),
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


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    scored = [_scored(token) for token in tokens if not token.ends]
    content = [_entry(own) | {"top_logprobs": list(map(_entry, tops))} for own, tops in scored]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """offset: of the first token in the text, in characters."""
    names, scores, offsets, tops = [], [], [], []
    for token in tokens:
        if token.ends:
            continue
        own, listed = _scored(token)
        name_of = _names([own, *listed])
        names.append(name_of[token.id])
        scores.append(_finite(own.logprob))
        tops.append({name_of[each.id]: _finite(each.logprob) for each in listed})
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": names,
        "token_logprobs": scores,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def _scored(token: Token) -> tuple[Alternative, list[Alternative]]:
    """Return the token, and the likeliest ones in its place, which it is one of."""
    own = Alternative(token.id, token.name, token.logprob or 0.0, token.raw)
    tops = [own if each.id == own.id else each for each in token.alternatives]
    return own, tops if own in tops or not tops else [*tops, own]


def _names(tokens: Sequence[Alternative]) -> dict[int, str]:
    """Return names by id that tell tokens apart. Of several with one text, the first has it;
    another is written as bytes or by id. A part of a character is "bytes:\\xf0\\x9f"."""
    names: dict[int, str] = {}
    for token in tokens:
        choices = [token.text, f"token_id:{token.id}"]
        if token.raw is not None:
            choices.insert(1, "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw))
            if token.raw.decode(errors="ignore").encode() != token.raw:
                del choices[0]
        if token.id not in names:
            names[token.id] = next(name for name in choices if name not in names.values())
    return names


def _entry(token: Alternative) -> dict[str, Any]:
    raw = list(token.raw or b"")
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)


def origin_of(token: Token) -> dict[str, Any]:
    """Return where a token came from; its probability has a place of its own."""
    part = {} if token.kind is PartKind.TEXT else {"kind": token.kind.value}
    named = {"drafter": token.drafter} if token.drafter else {}
    return {"id": token.id, "text": token.text, "origin": token.origin.value, **part, **named}


def reason_of(result: GenerationResult) -> str:
    """An answer that the server ended early is incomplete, as one that met a limit is."""
    return "stop" if result.finish_reason is FinishReason.STOP else "length"
