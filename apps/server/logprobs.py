"""Log probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_spec import Token

_NEVER = -9999.0  # OpenAI's for a probability of 0, whose logarithm JSON cannot write


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    content = [
        _entry(token.text, token.logprob)
        | {"top_logprobs": [_entry(each.text, each.logprob) for each in token.alternatives]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """offset: of the first token in the text, in characters."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    tops = [{each.text: _finite(each.logprob) for each in token.alternatives} for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)
