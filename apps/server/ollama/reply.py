"""Answers as Ollama's clients read them: a document, or one a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from edge_spec import GenerationResult, PartKind, Token
from edge_spec.apps.server.answer import Ended, Round
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.logprobs import chat_logprobs
from edge_spec.apps.server.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from edge_spec.apps.server.replies import reason_of
from edge_spec.apps.server.reply import Reply, arguments_of


class OllamaReply(Reply):
    """Calls of tools are told when all of them are complete."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, request: OllamaChatRequest, model: str) -> None:
        self._model = model
        self._is_chat = not isinstance(request, OllamaGenerateRequest)
        self._has_scores = request.num_logprobs is not None
        self._tells_thoughts = request.tells_thoughts

    def waiting(self) -> str:
        return _line(self._document())

    def piece(self, round_: Round) -> str:
        chunk = round_.chunk
        scores = self._scores(chunk.tokens)
        is_text = chunk.kind is PartKind.TEXT
        is_told = is_text or (chunk.kind is PartKind.REASONING and self._tells_thoughts)
        if not is_told or not (chunk.text or scores):
            return ""
        name = "content" if is_text else "thinking"
        return _line(self._document({name: chunk.text}, **scores))

    def end(self, ended: Ended) -> str:
        calls = _calls(ended.result)
        told = _line(self._document(calls)) if calls else ""
        return told + _line(self._document(**_last(ended.result)))

    def closing(self) -> str:
        return ""

    def failure(self, error: ApiError) -> str:
        return _line({"error": error.message})

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        (result,) = results
        is_told = result.reasoning and self._tells_thoughts
        thought = {"thinking": result.reasoning} if is_told else {}
        said = {"content": result.text, **thought, **_calls(result)}
        return self._document(said, **self._scores(result.tokens), **_last(result))

    def opened(self) -> dict[str, Any]:
        """Returns the answer to who asks for the model alone."""
        return self._document(done=True, done_reason="load")

    def _scores(self, tokens: Sequence[Token]) -> dict[str, Any]:
        asked = self._has_scores and tokens
        return {"logprobs": chat_logprobs(tokens)["content"]} if asked else {}

    def _document(self, said: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": "", **(said or {})}
        told: dict[str, Any] = {"message": message}
        if not self._is_chat:
            told = {"response": message.pop("content"), **message}
            del told["role"]
        now = datetime.now(UTC).isoformat()
        return {"model": self._model, "created_at": now, **told, "done": False, **fields}


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document) + "\n"


def _calls(result: GenerationResult) -> dict[str, Any]:
    """Returns the calls, without one that was cut: it would be made."""
    calls = result.tool_calls[:-1] if result.is_cut else result.tool_calls
    told = []
    for index, call in enumerate(calls):
        name, arguments = call["function"]["name"], arguments_of(call["function"]["arguments"])
        function = {"index": index, "name": name, "arguments": arguments}
        told.append({"id": call["id"], "function": function})
    return {"tool_calls": told} if told else {}


def _last(result: GenerationResult) -> dict[str, Any]:
    """Returns what ends an answer. Durations are in nanoseconds."""
    stats = result.stats
    durations = {"prompt_eval": stats.prompt_ms, "eval": stats.predicted_ms}
    counts = {"prompt_eval_count": stats.prompt_n, "eval_count": stats.predicted_n}
    told = {f"{name}_duration": round(ms * 1e6) for name, ms in durations.items()}
    ended = {"done": True, "done_reason": reason_of(result)}
    return {**ended, "total_duration": sum(told.values()), **counts, **told}
