"""Log probabilities as OpenAI's two endpoints write them: by token, whatever its text is.

The tokens are those of the text, so that a stream tells what the whole reply does: an end token is
counted in `usage` and not listed. Special tokens have their names and no bytes. The token that was
chosen is among its alternatives, beyond as many as were asked for where it was none of the
likeliest; where a stop string cuts the text within it, it is listed up to there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edge_spec import Token
from edge_spec.engine.results import Alternative

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
