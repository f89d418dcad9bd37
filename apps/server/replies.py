"""Replies as OpenAI's clients read them, and their figures: timings by llama.cpp's names and ours.

The listed tokens are those of the text: an end token is counted in `usage` and not listed. The
token that was chosen is among its alternatives.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from edge_spec import Chunk, FinishReason, GenerationResult, PartKind, Token
from edge_spec.apps.server.answer import Ended, Round
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.reply import Reply, server_event
from edge_spec.apps.server.request import Work
from edge_spec.engine.results import Alternative

_DONE = "data: [DONE]\n\n"
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


def _reason(result: GenerationResult) -> str:
    """An answer that ends within a call is cut, as one that ends within a text is."""
    called = result.tool_calls and not result.is_cut
    return "tool_calls" if called else reason_of(result)


class _ChoicesReply(Reply):
    """A reply whose documents have choices, and whose stream ends with [DONE]."""

    kind: ClassVar[str]
    prefix: ClassVar[str]  # of its id
    streamed: ClassVar[str]  # the kind of its events
    member: ClassVar[str]  # of a choice, which has what was written; in events `piece_member`
    piece_member: ClassVar[str]
    nothing: ClassVar[Any]  # what is written in the last event of a choice

    def __init__(self, work: Work, opening: Sequence[Any]) -> None:
        """opening: what each choice begins with."""
        super().__init__(work)
        self._opening = opening
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.streamed,
            "created": int(time.time()),
            "model": self._model,
        }
        self._has_logprobs = work.request.logprobs is not None
        self._results: list[GenerationResult] = []

    def opening(self) -> str:
        begun = enumerate(self._opening)
        choices = [_choice(index, self.piece_member, said) for index, said in begun]
        return self._event(choices) if choices else ""

    def piece(self, round_: Round) -> str:
        choice, chunk = round_.choice, round_.chunk
        said, origins, logprobs = self._said(choice, chunk), self._origins(round_), None
        if not (said or origins or (self._has_logprobs and chunk.tokens)):
            return ""
        if self._has_logprobs:
            logprobs = self._logprobs(choice, chunk.tokens)
        return self._event([_choice(choice, self.piece_member, said, logprobs)], **origins)

    def end(self, ended: Ended) -> str:
        self._results.append(ended.result)
        last = _choice(ended.choice, self.piece_member, self.nothing, None, _reason(ended.result))
        event = self._event([last], timings=timings([ended.result]), **self._origins(ended))
        if not self._request.tells_usage or len(self._results) < len(self._work.prompts):
            return event
        return event + self._event([], usage=usage(self._results, self._request.num_choices))

    def closing(self) -> str:
        return _DONE

    def failure(self, error: ApiError) -> str:
        return super().failure(error) + _DONE

    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        tokens = [origin_of(token) for result in results for token in result.tokens]
        choices = []
        for index, result in enumerate(results):
            logprobs = self._logprobs(index, result.tokens) if self._has_logprobs else None
            said = self._all_said(index, result)
            choices.append(_choice(index, self.member, said, logprobs, _reason(result)))
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": usage(results, self._request.num_choices),
            "timings": timings(results),
            **({"edge_spec": {"tokens": tokens}} if self._request.tells_origins else {}),
        }

    def _event(self, choices: Sequence[Any], **others: Any) -> str:
        if self._request.tells_usage:
            others.setdefault("usage", None)
        return server_event({**self._head, "choices": choices, **others})

    def _origins(self, of: Round) -> dict[str, Any]:
        """Return the member of an event that tells origins, where they are asked for."""
        if not self._request.tells_origins:
            return {}
        live = {
            "tokens": [origin_of(token) for token in of.chunk.tokens],
            "predicted_n": of.predicted_n,
            "live_per_second": of.live_per_second,
            "plain_per_second": of.plain_per_second,
        }
        return {"edge_spec": live}

    @abstractmethod
    def _said(self, choice: int, chunk: Chunk) -> Any:
        """Return what a chunk adds to a choice."""

    @abstractmethod
    def _all_said(self, choice: int, result: GenerationResult) -> Any:
        """Return what all chunks of a choice, and its beginning, add up to."""

    @abstractmethod
    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any]: ...


def _choice(
    index: int, member: str, said: Any, logprobs: Any = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, member: said, "logprobs": logprobs, "finish_reason": reason}


class ChatReply(_ChoicesReply):
    """The assistant's next message."""

    kind, streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    member, piece_member = "message", "delta"
    nothing: ClassVar = {}

    def __init__(self, work: Work) -> None:
        opening = [{"role": "assistant", "content": ""}] * len(work.prompts)
        super().__init__(work, opening)
        self._num_calls = [0] * len(opening)

    def _said(self, choice: int, chunk: Chunk) -> dict[str, Any]:
        """Of a call, index, id and name come first, then the arguments as they come."""
        if chunk.kind is PartKind.CALL:
            head: dict[str, Any] = {}
            function = {"arguments": chunk.text}
            if chunk.call is not None:
                self._num_calls[choice] += 1
                head = {"id": chunk.call.id, "type": "function"}
                function = {"name": chunk.call.name, **function}
            elif not chunk.text:
                return {}
            call = {"index": self._num_calls[choice] - 1, **head, "function": function}
            return {"tool_calls": [call]}
        if not chunk.text:
            return {}
        if chunk.kind is PartKind.TEXT:
            return {"content": chunk.text}
        return {"reasoning_content": chunk.text} if self._request.tells_thoughts else {}

    def _all_said(self, choice: int, result: GenerationResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.reasoning and self._request.tells_thoughts:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["content"] = result.text or None
            message["tool_calls"] = result.tool_calls
        return message

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return chat_logprobs(tokens)


class CompletionReply(_ChoicesReply):
    """The continuation of a text."""

    kind = streamed = "text_completion"
    prefix = "cmpl"
    member = piece_member = "text"
    nothing = ""

    def __init__(self, work: Work) -> None:
        echo = work.request.body.echo
        super().__init__(work, work.desk.texts(work.prompts) if echo else ())
        self._offsets = [0] * len(work.prompts)  # of the next token in the choice's text

    def _said(self, choice: int, chunk: Chunk) -> str:
        return chunk.text

    def _all_said(self, choice: int, result: GenerationResult) -> str:
        return self._opening[choice] + result.text if self._opening else result.text

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offset = self._offsets[choice]
        self._offsets[choice] += sum(len(token.text) for token in tokens)
        return completion_logprobs(tokens, offset)
