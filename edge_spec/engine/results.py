"""The results of a generation, and which of its tokens were drafted by whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from edge_spec.core.metrics import DraftCounts, Stats
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, Score
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.text.parts.part import CallHead, PartKind


class Origin(StrEnum):
    """How a token came about."""

    PLAIN = "plain"  # the round had no draft token
    ACCEPTED = "accepted"  # a draft token that the target confirmed
    RECOVERED = "recovered"  # the target's own choice after a wrong draft token
    BONUS = "bonus"  # the target's own choice after all draft tokens were right


class DecodedToken(NamedTuple):
    id: int
    origin: Origin
    drafter: str = ""  # of an accepted token, several joined by "+"
    score: Score | None = None  # if the sampler scores tokens


def draft_counts(tree: TokenTree, verdict: Verdict) -> dict[str, DraftCounts]:
    counts: dict[str, DraftCounts] = {}
    for row, names in enumerate(tree.proposed_by[1:], start=1):
        for name in names.split("+"):
            drafted, accepted = counts.get(name, (0, 0))
            counts[name] = DraftCounts(drafted + 1, accepted + (row in verdict.accepted_rows))
    return counts


def decoded_tokens(
    tree: TokenTree, verdict: Verdict, out: Forward, sampler: Sampler
) -> list[DecodedToken]:
    """Return each token with its origin, and its score at the row that it follows."""
    proposed_by = tree.proposed_by or ("",) * len(tree)
    decoded = []
    for i, (token, row) in enumerate(zip(verdict.tokens, verdict.kept, strict=True)):
        score = sampler.score(out.logits[row], token)
        if i < len(verdict.accepted_rows):
            drafter = proposed_by[verdict.accepted_rows[i]]
            decoded.append(DecodedToken(token, Origin.ACCEPTED, drafter, score))
            continue
        if len(tree) == 1:
            origin = Origin.PLAIN
        else:
            origin = Origin.BONUS if verdict.exhausted else Origin.RECOVERED
        decoded.append(DecodedToken(token, origin, score=score))
    return decoded


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # the model ended its text, or a stop string appeared
    LENGTH = "length"  # max_tokens or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"  # the model failed; earlier text stays


@dataclass(frozen=True)
class Alternative:
    """A likely token in the place of another one.

    `text` is the token by itself: the name of a special token, bytes such as "\\xf0\\x9f" for a
    part of a character. `raw` is what it adds to a text, None if nothing.
    """

    id: int
    text: str
    logprob: float
    raw: bytes | None = None

    def to_dict(self) -> dict[str, Any]:
        told = {"id": self.id, "text": self.text, "logprob": self.logprob}
        return told | {"bytes": list(self.raw or b"")}


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    `text` is what it added to the text: "" for special tokens and for all but the last token of a
    character. `logprob` is the natural logarithm of its probability by the model itself, at
    temperature 1, before penalties and grammar; `alternatives` are the likeliest tokens in its
    place. With a `logprob`, `name` and `raw` are its own `text` and `raw` as an alternative, up to
    where a stop string cut the text. `ends`: an end token, the last of its answer. `kind`: the part
    that it belongs to; in a call, `text` is what the token wrote.
    """

    id: int
    text: str
    origin: Origin
    drafter: str = ""  # whose draft token was accepted, several joined by "+"
    logprob: float | None = None  # if it was asked for
    alternatives: tuple[Alternative, ...] = ()
    name: str = ""
    raw: bytes | None = None
    ends: bool = False
    kind: PartKind = PartKind.TEXT

    def to_dict(self) -> dict[str, Any]:
        named = {"drafter": self.drafter} if self.drafter else {}
        scored: dict[str, Any] = {}
        if self.logprob is not None:
            own = {"name": self.name, "bytes": list(self.raw or b"")}
            listed = [alternative.to_dict() for alternative in self.alternatives]
            scored = {"logprob": self.logprob, **own, "alternatives": listed}
        part = {} if self.kind is PartKind.TEXT else {"kind": self.kind.value}
        own_text = {"id": self.id, "text": self.text, "origin": self.origin.value}
        return {**own_text, **part, **named, **scored}


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer, of one part, written in one or more rounds.

    `kind` is the part of `text`: the text, a thought ("reasoning"), or the arguments of a tool call
    ("call"), as JSON. `call` comes with the first piece of each call.
    """

    text: str
    tokens: tuple[Token, ...]
    kind: PartKind = PartKind.TEXT
    call: CallHead | None = None


class PredictionCounts(NamedTuple):
    """Tokens of a predicted text that are in the answer, and those that are not, whoever
    drafted."""

    accepted: int
    rejected: int


@dataclass
class GenerationResult:
    """A finished generation, or what there is of one being streamed.

    `reasoning` is what the model thought before `text`, in `reasoning_ms`. `tool_calls` have
    OpenAI's format; `is_cut`: the answer ended within the last of them.
    """

    text: str = ""
    reasoning: str = ""
    reasoning_ms: float = 0.0
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended the text, if any
    stats: Stats = field(default_factory=Stats)
    seed: int | None = None  # of the random draws, if any
    prediction: PredictionCounts | None = None  # if a text was predicted

    @property
    def reasoning_n(self) -> int:
        """Return the number of tokens of the thought, including its tags."""
        return sum(token.kind is PartKind.REASONING for token in self.tokens)

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        if chunk.kind is PartKind.TEXT:
            self.text += chunk.text
        elif chunk.kind is PartKind.REASONING:
            self.reasoning += chunk.text
        elif chunk.call is not None:
            function = {"name": chunk.call.name, "arguments": chunk.text}
            call = {"id": chunk.call.id, "type": "function", "function": function}
            self.tool_calls.append(call)
        elif self.tool_calls:
            self.tool_calls[-1]["function"]["arguments"] += chunk.text

    def to_dict(self) -> dict[str, Any]:
        predicted = {"prediction": self.prediction._asdict()} if self.prediction else {}
        parts: dict[str, Any] = {}
        if self.reasoning_n:
            parts = {"reasoning": self.reasoning, "reasoning_n": self.reasoning_n}
            parts["reasoning_ms"] = self.reasoning_ms
        if self.tool_calls:
            parts["tool_calls"] = self.tool_calls
        return {
            "text": self.text,
            **parts,
            "finish_reason": self.finish_reason and self.finish_reason.value,
            "tokens": [token.to_dict() for token in self.tokens],
            "stats": self.stats.to_dict(),
            "seed": self.seed,
            **predicted,
        }


_EXACT_S = 60.0  # shorter times show tenths of seconds


def thought_line(result: GenerationResult) -> str:
    count = result.reasoning_n
    tokens = "1 token" if count == 1 else f"{count} tokens"
    return f"thought for {told_time(result.reasoning_ms / 1e3)} ({tokens})"


def cut_thought(result: GenerationResult) -> str | None:
    """Return why an answer that ended within its thought has no text."""
    if result.text.strip() or not result.reasoning or result.tool_calls:
        return None
    if result.finish_reason is FinishReason.LENGTH:
        return (
            f"the limit of {len(result.tokens)} tokens was reached within the thought: "
            "--max-tokens raises it, --reasoning N ends a thought after N tokens"
        )
    if result.finish_reason is FinishReason.STOP:
        return "the model ended its answer within the thought: --reasoning off asks for none"
    return None


def told_time(seconds: float) -> str:
    if seconds < _EXACT_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
