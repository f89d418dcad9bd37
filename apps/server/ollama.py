"""Ollama's API: bodies and replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from edge_spec import GenerationResult, PartKind, Token
from edge_spec.apps.server.answer import Round
from edge_spec.apps.server.body import Message, message_of, refusal
from edge_spec.apps.server.errors import ApiError, refused
from edge_spec.apps.server.openai import ChatBody
from edge_spec.apps.server.reply import Reply, arguments_of, chat_logprobs, reason_of
from edge_spec.apps.server.schema import ConversationBody, Gap, Request


class OllamaBody(ConversationBody):
    """Without messages or a prompt, the request only opens the model."""

    stream: bool | None = True
    n: Literal[1] | None = None

    @model_validator(mode="before")
    @classmethod
    def _speaks_plainly(cls, given: Any) -> Any:
        """Rename Ollama's fields to ours, and move its options to the top level."""
        if not isinstance(given, dict):
            return given
        told = {name: value for name, value in given.items() if name not in ("options", "format")}
        options, format = given.get("options") or {}, given.get("format")
        if not isinstance(options, dict):
            raise refusal("options", "should be an object")
        if isinstance(format, dict):
            told["response_format"] = {"type": "json_schema", "schema": format}
        elif format == "json":
            told["response_format"] = {"type": "json_object"}
        elif format:
            raise refusal("format", "is no form that is known here: send json or a JSON Schema")
        if isinstance(told.get("think"), str):
            told["reasoning_effort"] = told.pop("think")
        return {**options, **told}


class OllamaChatBody(OllamaBody, ChatBody):
    messages: list[Message] = Field(default_factory=list)


class OllamaGenerateBody(OllamaBody):
    """raw: continue the prompt without a template. suffix: ask for the text between both."""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None

    def request(self) -> Request:
        if self.system and (self.raw or self.suffix):
            told = "is of the chat template, which raw and suffix go without."
            raise refused("system", told)
        asked = super().request()
        if not (self.prompt or self.suffix):
            return asked
        if self.suffix:
            return replace(asked, gap=Gap(self.prompt, self.suffix))
        if self.raw:
            return replace(asked, prompts=[self.prompt])
        system = [message_of("system", self.system)] if self.system else []
        return replace(asked, messages=[*system, message_of("user", self.prompt)])


class OllamaReply(Reply):
    """An answer in Ollama's form. Tool calls are sent together, once all are complete."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def waiting(self) -> str:
        return _line(self._document())

    def piece(self, round_: Round) -> str:
        chunk = round_.chunk
        scores = self._scores(chunk.tokens)
        is_text = chunk.kind is PartKind.TEXT
        is_told = is_text or (chunk.kind is PartKind.REASONING and self._request.tells_thoughts)
        if not is_told or not (chunk.text or scores):
            return ""
        name = "content" if is_text else "thinking"
        return _line(self._document({name: chunk.text}, **scores))

    def end(self, round_: Round, result: GenerationResult) -> str:
        calls = _calls(result)
        told = _line(self._document(calls)) if calls else ""
        return told + _line(self._document(**_last(result)))

    def failure(self, error: ApiError) -> str:
        return _line(error.document("/api/"))

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        if not results:
            return self._document(done=True, done_reason="load")
        (result,) = results
        is_told = result.reasoning and self._request.tells_thoughts
        thought = {"thinking": result.reasoning} if is_told else {}
        said = {"content": result.text, **thought, **_calls(result)}
        return self._document(said, **self._scores(result.tokens), **_last(result))

    def _scores(self, tokens: Sequence[Token]) -> dict[str, Any]:
        asked = self._request.logprobs is not None and tokens
        return {"logprobs": chat_logprobs(tokens)["content"]} if asked else {}

    def _document(self, said: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        content = {"content": "", **(said or {})}
        told: dict[str, Any] = {"message": {"role": "assistant", **content}}
        if isinstance(self._request.body, OllamaGenerateBody):
            told = {"response": content.pop("content"), **content}
        now = datetime.now(UTC).isoformat()
        return {"model": self._model, "created_at": now, **told, "done": False, **fields}


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document) + "\n"


def _calls(result: GenerationResult) -> dict[str, Any]:
    """Return the tool calls, without one that was cut, as clients would run it."""
    calls = result.tool_calls[:-1] if result.is_cut else result.tool_calls
    told = []
    for index, call in enumerate(calls):
        function = {"index": index, **call["function"]}
        function["arguments"] = arguments_of(function["arguments"])
        told.append({"id": call["id"], "function": function})
    return {"tool_calls": told} if told else {}


def _last(result: GenerationResult) -> dict[str, Any]:
    """Return the fields of an answer's end. Durations are in nanoseconds."""
    stats = result.stats
    durations = {"prompt_eval": stats.prompt_ms, "eval": stats.predicted_ms}
    counts = {"prompt_eval_count": stats.prompt_n, "eval_count": stats.predicted_n}
    told = {f"{name}_duration": round(ms * 1e6) for name, ms in durations.items()}
    ended = {"done": True, "done_reason": reason_of(result)}
    return {**ended, "total_duration": sum(told.values()), **counts, **told}
