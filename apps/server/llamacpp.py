"""llama.cpp's own endpoints: infill, tokenize, detokenize and apply-template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI
from pydantic import Field

from edge_spec import FinishReason, GenerationResult
from edge_spec.apps.server.answer import OpenModel, Round, Work
from edge_spec.apps.server.body import ALSO, HARMLESS, MAX_INT, Body, Whole
from edge_spec.apps.server.errors import refused
from edge_spec.apps.server.models import Models
from edge_spec.apps.server.openai import ChatBody, CompletionBody
from edge_spec.apps.server.reply import Reply, chat_logprobs, server_event, timings
from edge_spec.apps.server.request import read
from edge_spec.apps.server.schema import AnswerBody, Gap, Request, TokenId
from edge_spec.core.text_codec import TextCodec
from edge_spec.text.control_tokens import PlainText
from edge_spec.text.infill import InfillPrompt

MAX_FILES = 1024


class InfillFile(Body):
    """Another file, or part of one."""

    also: ClassVar = {"name": "filename", "content": "text"}
    harmless = frozenset(("time",))
    text: str
    filename: str = "tmp"


class InfillBody(AnswerBody):
    """Asks for the text between a prefix and a suffix.

    prompt: what follows input_prefix, such as the cursor's line. spm_infill: put the suffix first.
    max_tokens: 0 only prefills the prompt, so that the next request finds it in the cache.
    """

    also: ClassVar = ALSO | {"extra_context": "input_extra"}
    harmless = HARMLESS | {"samplers"}  # sampling has an order of its own
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    spm_infill: bool | None = None
    max_tokens: Annotated[Whole, Field(ge=-2, le=MAX_INT)] | None = None
    n: Literal[1] | None = None
    t_max_predict_ms: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None

    def request(self) -> Request:
        # An empty file has no text, and a request that only prefills may have only other files.
        if not {"input_prefix", "input_suffix", "input_extra", "prompt"} & self.model_fields_set:
            raise refused("input_prefix", "is missing: send the text before the cursor.")
        asked, prefix = super().request(), self.input_prefix + (self.prompt or "")
        files = [(each.filename, each.text) for each in self.input_extra or ()]
        options = {"names_file": True, "suffix_first": self.spm_infill}
        return replace(
            asked,
            gap=Gap(prefix, self.input_suffix, files, options),
            limit_s=(self.t_max_predict_ms or 0) / 1e3,
            max_tokens=1 if self.reads_alone else asked.max_tokens,
        )

    @property
    def reads_alone(self) -> bool:
        """True if nothing is to be written."""
        return self.max_tokens == 0 and self.max_completion_tokens is None


class FimBody(CompletionBody):
    """Asks for the text between a prompt and a suffix, which may be empty."""

    def request(self) -> Request:
        if not isinstance(self.prompt, str):
            raise refused("prompt", "is no text: send the one before the answer.")
        if self.echo:
            raise refused("echo", "is not supported: leave it out.")
        return replace(super().request(), gap=Gap(self.prompt, self.suffix or ""))


class TokenizeRequest(Body):
    """add_special: begin with the tokens that begin texts. parse_special: read control tokens that
    the text spells out."""

    model: str | None = None
    content: str = ""
    add_special: bool | None = False
    parse_special: bool | None = True
    with_pieces: bool | None = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId] = Field(default_factory=list)


def tokenized(model: OpenModel, request: TokenizeRequest) -> list[Any]:
    """Return the tokens, with their texts or bytes if requested."""
    codec = model.engine.parts.text.tokenizer
    plain = PlainText(codec, model.engine.parts.text.eos_ids)
    ids = list(plain.beginning) if request.add_special else []
    if request.parse_special is False:
        ids += plain.tokens(request.content)
    else:
        ids += codec.encode(request.content)[len(plain.beginning) :]
    return [{"id": id, "piece": _piece(codec, id)} for id in ids] if request.with_pieces else ids


def detokenized(model: OpenModel, tokens: Sequence[int]) -> str:
    """Return the text, control tokens written out. Raises ApiError for an unknown token."""
    size = model.engine.parts.model.config.vocab_size
    wrong = next((token for token in tokens if token >= size), None)
    if wrong is not None:
        raise refused("tokens", f"has {wrong}: tokens are 0 to {size - 1}.")
    codec = model.engine.parts.text.tokenizer
    stream, text = codec.stream(), ""
    for token in tokens:
        special = codec.special_text(token)
        text += stream.finish() + special if special else stream.push(token)
        if special:
            stream = codec.stream()
    return text + stream.finish()


def _piece(codec: TextCodec, token: int) -> str | list[int]:
    if special := codec.special_text(token):
        return special
    raw = codec.piece(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


class InfillReply(Reply):
    """One text. A stream has an event for each piece, and a last one with the figures."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._body: InfillBody = work.request.body
        self._context_length = work.model.engine.context_length
        (tokens,) = work.prompts
        self._prompt = work.model.engine.parts.text.tokenizer.decode(tokens)
        self._is_cut = isinstance(tokens, InfillPrompt) and tokens.is_cut
        self._prompt_n = len(tokens)

    def piece(self, round_: Round) -> str:
        text, tokens = round_.chunk.text, [token.id for token in round_.chunk.tokens]
        if self._body.reads_alone or not (text or tokens):
            return ""
        told = {
            "index": 0,
            "content": text,
            "tokens": tokens if self._body.return_tokens else [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": round_.predicted_n,
            "tokens_evaluated": self._prompt_n,
        }
        return server_event(told)

    def end(self, round_: Round, result: GenerationResult) -> str:
        return server_event(self._told(result, content="", tokens=[]))

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return self._told(results[0])

    def _told(self, result: GenerationResult, **streamed: Any) -> dict[str, Any]:
        """Return the requested fields, or all if none is named."""
        body, stats = self._body, result.stats
        written = [] if body.reads_alone else result.tokens
        is_full = stats.prompt_n + stats.predicted_n >= self._context_length
        stop_type = "eos" if result.stop is None else "word"
        if result.finish_reason is not FinishReason.STOP:
            stop_type = "limit"
        told = {
            "index": 0,
            "content": "" if body.reads_alone else result.text,
            "tokens": [each.id for each in written if not each.ends and body.return_tokens],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": stats.predicted_n,
            "tokens_evaluated": stats.prompt_n,
            "generation_settings": {"n_ctx": self._context_length},
            "prompt": self._prompt,
            "has_new_line": bool(written) and "\n" in result.text,
            "truncated": self._is_cut or (result.finish_reason is FinishReason.LENGTH and is_full),
            "stop_type": stop_type,
            "stopping_word": (stop_type == "word" and result.stop) or "",
            "tokens_cached": stats.prompt_n + stats.predicted_n,
            "timings": timings([result]),
            **streamed,
        }
        if self._request.logprobs is not None:
            told["completion_probabilities"] = chat_logprobs(result.tokens)["content"]
        return dict(_members(told, body.response_fields)) if body.response_fields else told


def _members(told: Mapping[str, Any], fields: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that exist; "timings/prompt_n" names a nested one."""
    for field in fields:
        found: Any = told
        with suppress(KeyError, TypeError):
            for name in field.split("/"):
                found = found[name]
            yield field, found


def add_llamacpp_paths(app: FastAPI, models: Models) -> None:
    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text."""
        return {"tokens": await models.ask(request.model, lambda model: tokenized(model, request))}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens, control tokens written out."""
        asked = request.tokens
        return {"content": await models.ask(request.model, lambda model: detokenized(model, asked))}

    @app.post("/apply-template")
    async def apply_template(body: ChatBody) -> dict[str, Any]:
        """Return the prompt that the chat template makes of a request."""

        def rendered(model: OpenModel) -> str:
            return detokenized(model, read(model, body.request()).prompts[0])

        return {"prompt": await models.ask(body.model, rendered)}
