"""Endpoints of llama.cpp's server: texts between two others, tokens and prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI
from pydantic import AfterValidator, Field, Tag, WithJsonSchema, model_validator
from starlette.responses import Response

from edge_spec import Chunk, FinishReason, Generation, GenerationResult
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.fields import ALSO, HARMLESS, MAX_INT, Body, Whole, refusal
from edge_spec.apps.server.replies import ChatReply, chat_logprobs, timings
from edge_spec.apps.server.reply import EVENTS, AnswerResponse, Reply, Running, server_event
from edge_spec.apps.server.schema import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    TokenId,
    limit,
)
from edge_spec.apps.server.work import Desk
from edge_spec.apps.validation import by_kind
from edge_spec.core.text_codec import PiecewiseCodec, TextCodec
from edge_spec.text.control_tokens import PlainText
from edge_spec.text.infill import InfillPrompt

MAX_FILES = 1024


def _limit(value: int) -> int:
    return value and limit(value)


class InfillFile(Body):
    """Another file, or a part of one."""

    also: ClassVar = {"name": "filename", "content": "text"}
    harmless = frozenset(("time",))
    text: str
    filename: str = "tmp"


class InfillRequest(AnswerRequest):
    """Asks for what stands between two texts. prompt: what follows input_prefix, such as the line
    of the cursor. spm_infill: whether the suffix comes first; null is the model's own order.
    max_tokens: 0 reads the prompt alone, so that it is kept for the next request."""

    also: ClassVar = ALSO | {"extra_context": "input_extra"}
    harmless = HARMLESS | {
        "t_max_prompt_ms",
        "samplers",
    }  # samplers have their own order
    has_origins = False
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    spm_infill: bool | None = None
    max_tokens: (
        Annotated[
            Whole,
            AfterValidator(_limit),
            WithJsonSchema({"type": "integer", "minimum": -2, "maximum": MAX_INT}),
        ]
        | None
    ) = None
    n: Literal[1] | None = None
    t_max_predict_ms: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    n_indent: Annotated[Whole, Field(ge=0, le=MAX_INT)] | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None

    @property
    def limit(self) -> int | None:
        return 1 if self.reads_alone else super().limit

    @property
    def reads_alone(self) -> bool:
        """Says whether nothing is to be written."""
        return self.max_tokens == 0 and self.max_completion_tokens is None

    @model_validator(mode="after")
    def _has_text(self) -> InfillRequest:
        """An empty file has no text, and a prompt that is only read may have other files alone."""
        given = {"input_prefix", "input_suffix", "input_extra", "prompt"} & self.model_fields_set
        if not given:
            raise refusal("input_prefix", "is missing: send the text before the cursor")
        return self


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str | TokenId], Tag("<list>")],
    by_kind("a text, or a list of texts and token ids", {str: "<text>", list: "<list>"}),
]


class _ModelRequest(Body):
    model: str | None = None


class TokenizeRequest(_ModelRequest):
    """add_special: with the tokens that begin a text. parse_special: reads control tokens that the
    text spells."""

    content: Content = ""
    add_special: bool | None = False
    parse_special: bool | None = True
    with_pieces: bool | None = False


class DetokenizeRequest(_ModelRequest):
    tokens: list[TokenId] = Field(default_factory=list)


_INDENTATION = " \t"


@dataclass
class LineLimits:
    """Reads a text as it comes, and ends it once: before a line after the first one that is
    indented by less than `least_indent` characters, an empty one included, or after the line that
    is being written `seconds` after the text has begun. None, or 0: has no such limit.
    """

    least_indent: int | None = None
    seconds: float | None = None
    clock: Callable[[], float] = time.perf_counter
    text: str = ""  # that is shown
    has_ended: bool = False
    _held: str = ""  # a line break and what is known of the indentation after it
    _began: float | None = None

    def push(self, piece: str) -> str:
        """Returns what of it is shown."""
        if self.has_ended:
            return ""
        now = self.clock()
        self._began = now if self._began is None else self._began
        shown = self._indented(piece) if self.least_indent else piece
        at = shown.find("\n") + 1
        if at and self.seconds and now - self._began > self.seconds:
            self.has_ended, self._held = True, ""
            shown = shown[:at]
        self.text += shown
        return shown

    def finish(self) -> str:
        """Returns what was held back, when no more comes."""
        held, self._held = self._held, ""
        self.text += held
        return held

    def _indented(self, piece: str) -> str:
        """Returns the text up to a line that is not indented enough."""
        text, self._held = self._held + piece, ""
        at = text.find("\n")
        while at >= 0:
            line = text[at + 1 :]
            indent = len(line) - len(line.lstrip(_INDENTATION))
            if indent == len(line):
                text, self._held = text[:at], text[at:]
                break
            if indent < (self.least_indent or 0):
                self.has_ended = True
                return text[: at + 1 + indent]
            at = text.find("\n", at + 1)
        return text


def limited(generation: Generation, limits: LineLimits) -> Iterator[Chunk]:
    """Yields an answer up to where its lines end it; its result then has that text, too."""
    for chunk in generation:
        yield replace(chunk, text=limits.push(chunk.text))
        if limits.has_ended:
            generation.cancel()
    if left := limits.finish():
        yield Chunk(left, ())
    generation.result.text = limits.text


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


def _limited(work: Work, request: InfillRequest) -> Work:
    """Returns it with what ends its text at a line."""
    time_ms = max(0, request.t_max_predict_ms or 0)
    if not (time_ms or request.n_indent):
        return work
    limits = LineLimits(request.n_indent, time_ms / 1e3)
    return replace(work, cut=partial(limited, limits=limits))


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


class InfillReply(Reply):
    """One text. A stream has an event for each piece of it, and one with the figures at its end."""

    def __init__(self, request: InfillRequest, work: Work, desk: Desk) -> None:
        self._request = request
        self._model = desk.model
        self._context_length = desk.engine.context_length
        (self._prompt,) = desk.texts(work.prompts)
        (tokens,) = work.prompts
        self._is_cut = isinstance(tokens, InfillPrompt) and tokens.is_cut
        self._prompt_n = len(tokens)

    def piece(self, round_: Round) -> str:
        text, tokens = round_.chunk.text, [token.id for token in round_.chunk.tokens]
        if self._request.reads_alone or not (text or tokens):
            return ""
        told = {
            "index": 0,
            "content": text,
            "tokens": tokens if self._request.return_tokens else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": round_.predicted_n,
            "tokens_evaluated": self._prompt_n,
        }
        return server_event(json.dumps(told))

    def end(self, ended: Ended) -> str:
        told = self._told(ended.result) | {"content": "", "tokens": []}
        return server_event(json.dumps(self._chosen(told)))

    def failure(self, error: ApiError) -> str:
        return server_event(json.dumps(error.document()))

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return self._chosen(self._told(results[0]))

    def _chosen(self, told: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields that are asked for; all where none is named."""
        fields = self._request.response_fields
        return dict(_members(told, fields)) if fields else told

    def _told(self, result: GenerationResult) -> dict[str, Any]:
        request, is_silent = self._request, self._request.reads_alone
        text = "" if is_silent else result.text
        written = [] if is_silent else [token.id for token in result.tokens if not token.ends]
        figures = timings([result])
        scores = (
            chat_logprobs(result.tokens)["content"] if request.num_logprobs is not None else None
        )
        return {
            "index": 0,
            "content": text,
            "tokens": written if request.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": result.stats.predicted_n,
            "tokens_evaluated": result.stats.prompt_n,
            "generation_settings": {"n_ctx": self._context_length},
            "prompt": self._prompt,
            "has_new_line": "\n" in text,
            "truncated": self._is_cut or self._has_filled(result),
            **self._ending(result),
            "tokens_cached": result.stats.prompt_n + result.stats.predicted_n,
            "timings": figures,
            **({} if scores is None else {"completion_probabilities": scores}),
        }

    def _has_filled(self, result: GenerationResult) -> bool:
        """Says whether the answer has ended where the context does."""
        num_tokens = result.stats.prompt_n + result.stats.predicted_n
        return result.finish_reason is FinishReason.LENGTH and num_tokens >= self._context_length

    def _ending(self, result: GenerationResult) -> dict[str, str]:
        """Says why it has ended, and the stop string that ended it."""
        if result.finish_reason is not FinishReason.STOP:
            return {"stop_type": "limit", "stopping_word": ""}
        kind = "eos" if result.stop is None else "word"
        return {"stop_type": kind, "stopping_word": result.stop or ""}


def _members(told: Mapping[str, Any], fields: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields those that there are; "timings/prompt_n" is a member of a member."""
    for field in fields:
        found: Any = told
        for name in field.split("/"):
            if not isinstance(found, dict) or name not in found:
                break
            found = found[name]
        else:
            yield field, found


LLAMACPP_PATHS = ("/infill", "/v1/fim/completions", "/tokenize", "/detokenize", "/apply-template")


def add_llamacpp_paths(app: FastAPI, running: Running) -> None:
    @app.post("/infill", response_model=None, responses=EVENTS)
    async def infill(request: InfillRequest) -> Response:
        """What stands between two texts, such as those around a cursor."""
        return AnswerResponse(running, request, infill_work, InfillReply)

    @app.post("/v1/fim/completions", response_model=None, responses=EVENTS)
    async def fim(request: CompletionRequest) -> Response:
        """What stands between a prompt and its suffix, in the form of Mistral's API."""
        return AnswerResponse(running, request, fim_work, ChatReply)

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text."""
        return {"tokens": await running.ask(request.model, lambda desk: tokenized(desk, request))}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens, control tokens written out."""
        return {
            "content": await running.ask(request.model, lambda desk: detokenized(desk, request))
        }

    @app.post("/apply-template")
    async def apply_template(request: ChatRequest) -> dict[str, Any]:
        """The prompt that the chat template makes of a request."""
        return {"prompt": await running.ask(request.model, lambda desk: rendered(desk, request))}
