"""Turns requests to llama.cpp's own endpoints into what an engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.line_limits import LineLimits
from edge_spec.apps.server.llamacpp_requests import (
    DetokenizeRequest,
    InfillRequest,
    LlamaCppRequest,
    TextRequest,
    TokenizeRequest,
)
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest
from edge_spec.apps.server.work import Desk
from edge_spec.core.text_codec import PiecewiseCodec, TextCodec
from edge_spec.text.control_tokens import PlainText


def infill_work(desk: Desk, request: InfillRequest) -> Work:
    """Raises EdgeSpecError, ApiError, UnicodeEncodeError."""
    work = desk.between(
        request,
        request.input_prefix + (request.prompt or ""),
        request.input_suffix,
        [(each.filename, each.text) for each in request.input_extra or ()],
        names_file=True,
        suffix_first=request.spm_infill,
    )
    return _limited(work, request)


def fim_work(desk: Desk, request: CompletionRequest) -> Work:
    """Returns what stands between the prompt and a suffix that may be empty. Raises as
    `infill_work` does."""
    if not isinstance(request.prompt, str):
        raise ApiError(400, "prompt is no text: send the one before the answer.", param="prompt")
    if request.echo:
        raise ApiError(400, "echo is not supported: leave it out.", param="echo")
    return desk.between(request, request.prompt, request.suffix or "")


def completion_work(desk: Desk, request: TextRequest) -> Work:
    """Raises as `infill_work` does."""
    return _limited(desk.completion(request), request)


def _limited(work: Work, request: LlamaCppRequest) -> Work:
    """Returns it with what ends its text at a line."""
    time_ms = max(0, request.t_max_predict_ms or 0)
    if not (time_ms or request.n_indent):
        return work
    return replace(work, line_limits=partial(LineLimits, request.n_indent, time_ms / 1e3))


def tokenized(desk: Desk, request: TokenizeRequest) -> list[Any]:
    """Returns the tokens, or objects with the text of each, or its bytes where it is a part of a
    character. Raises ApiError for what is no token of the model."""
    codec = desk.engine.parts.text.tokenizer
    plain = PlainText(codec, desk.engine.parts.text.eos_ids)
    given = [request.content] if isinstance(request.content, str) else request.content
    ids: list[int] = []
    for at, part in enumerate(given):
        if isinstance(part, int):
            ids.append(part)
            continue
        read = codec.encode(part)[len(plain.beginning) :]
        tokens = plain.tokens(part) if request.parse_special is False else read
        ids += [*(plain.beginning if request.add_special and not at else ()), *tokens]
    _check_tokens(desk, "content", ids)
    if not request.with_pieces:
        return ids
    return [{"id": token, "piece": _piece(codec, token)} for token in ids]


def detokenized(desk: Desk, request: DetokenizeRequest) -> str:
    """Raises as `tokenized` does."""
    _check_tokens(desk, "tokens", request.tokens)
    return _text(desk, request.tokens)


def rendered(desk: Desk, request: ChatRequest) -> str:
    """Returns what the model is given for a conversation. Raises as `infill_work` does."""
    (prompt, *_) = desk.chat(request).prompts
    return _text(desk, prompt)


def _text(desk: Desk, tokens: Sequence[int]) -> str:
    codec = desk.engine.parts.text.tokenizer
    stream, text = codec.stream(), ""
    for token in tokens:
        special = codec.special_text(token)
        text += stream.finish() + special if special else stream.push(token)
        if special:
            stream = codec.stream()
    return text + stream.finish()


def _check_tokens(desk: Desk, field: str, ids: list[int]) -> None:
    size = desk.engine.parts.model.config.vocab_size
    wrong = next((token for token in ids if token >= size), None)
    if wrong is not None:
        raise ApiError(400, f"{field} has {wrong}: tokens are 0 to {size - 1}.", param=field)


def _piece(codec: TextCodec, token: int) -> str | list[int]:
    special = codec.special_text(token)
    if special or not isinstance(codec, PiecewiseCodec):
        return special or codec.decode([token])
    raw = codec.piece(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
