"""Answers as clients of llama.cpp's own completions read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_spec import FinishReason, GenerationResult
from edge_spec.apps.server.answer import Ended, Round, Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.llamacpp_requests import LlamaCppRequest
from edge_spec.apps.server.logprobs import chat_logprobs
from edge_spec.apps.server.reply import Reply, server_event
from edge_spec.apps.server.timings import timings
from edge_spec.text.infill import InfillPrompt


class LlamaCppReply(Reply):
    """One text. A stream has an event for each piece of it, and one with the figures at its end."""

    def __init__(
        self, request: LlamaCppRequest, work: Work, model: str, context_length: int, prompt: str
    ) -> None:
        """prompt: its text."""
        self._request = request
        self._model = model
        self._context_length = context_length
        self._prompt = prompt
        self._options = work.options[0]
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

    def closing(self) -> str:
        return ""

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
            "generation_settings": self._settings(),
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

    def _settings(self) -> dict[str, Any]:
        params = self._options["sampling"]
        limit = self._options.get("max_tokens", -1)
        return {
            "n_ctx": self._context_length,
            "n_predict": 0 if self._request.reads_alone else limit,
            "max_tokens": 0 if self._request.reads_alone else limit,
            "seed": -1 if params.seed is None else params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(self._request.stops),
            "ignore_eos": bool(self._request.ignore_eos),
            "stream": bool(self._request.stream),
            "n_probs": self._request.n_probs or 0,
        }


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
