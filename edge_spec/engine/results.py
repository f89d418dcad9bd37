"""The results of a generation, and which of its tokens were drafted, and by whom."""

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
    """The way a token came about."""

    PLAIN = "plain"  # the round had no draft token
    ACCEPTED = "accepted"  # a draft token that the target confirmed
    RECOVERED = "recovered"  # the target's own choice after a wrong draft token
    BONUS = "bonus"  # the target's own choice after all draft tokens were right


class DecodedToken(NamedTuple):
    id: int
    origin: Origin
    drafter: str = ""  # whose draft token it was, several joined by "+", where it was accepted
    score: Score | None = None  # where the sampler scores tokens


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
    """Returns each token with where it comes from, and how likely it was at the row it follows."""
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
    ERROR = "error"  # the model failed; what it wrote before stays


@dataclass(frozen=True)
class Alternative:
    """A token that the model found likely where another one may have been written.

    `text` is the token by itself: its name for a special one, bytes such as "\\xf0\\x9f" for a
    part of a character. `raw` is what it adds to a text, None where it has none.
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
    """`text` is what the token added to the text: "" for special tokens and for all but the
    last token of a character.

    `logprob` is the natural logarithm of its probability by the model itself, at temperature 1,
    before penalties and grammar; `alternatives` are the likeliest tokens in its place. Where it has
    one, `name` and `raw` are its own `text` and `raw` as an alternative, up to where a stop string
    has cut the text. `ends`: it is an end token, the last of its answer. `kind`: of the part that
    it belongs to; of a call, `text` is what the token wrote.
    """

    id: int
    text: str
    origin: Origin
    drafter: str = ""  # whose draft token was accepted, several joined by "+"
    logprob: float | None = None  # where it was asked for
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
    """A piece of a streamed answer: of one part of it, written in one round or more.

    `kind` says of which part `text` is: the text, a thought ("reasoning"), or the arguments of a
    call of a tool ("call"), as JSON. `call` goes with the first piece of each call.
    """

    text: str
    tokens: tuple[Token, ...]
    kind: PartKind = PartKind.TEXT
    call: CallHead | None = None


class PredictionCounts(NamedTuple):
    """Tokens of a predicted text that the answer has, and those that it has not. They do not depend
    on who drafted what."""

    accepted: int
    rejected: int


@dataclass
class GenerationResult:
    """A finished generation; while one is streamed, what there is of it so far.

    `reasoning` is what the model thought before `text`, in `reasoning_ms`. `tool_calls` are as
    OpenAI has them; `is_cut` says that the answer has ended within the last of them.
    """

    text: str = ""
    reasoning: str = ""
    reasoning_ms: float = 0.0
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended the text, if one did
    stats: Stats = field(default_factory=Stats)
    seed: int | None = None  # of the random draws, where there were any
    prediction: PredictionCounts | None = None  # where there was one

    @property
    def reasoning_n(self) -> int:
        """Returns the number of tokens of the thought, those of its tags included."""
        return sum(token.kind is PartKind.REASONING for token in self.tokens)

    def add(self, chunk: Chunk) -> None:
        """Adds the next piece."""
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


_EXACT_S = 60.0  # below it, tenths of seconds are told


def thought_line(result: GenerationResult) -> str:
    """Returns what is shown of a thought that has ended."""
    count = result.reasoning_n
    tokens = "1 token" if count == 1 else f"{count} tokens"
    return f"thought for {told_time(result.reasoning_ms / 1e3)} ({tokens})"


def cut_thought(result: GenerationResult) -> str | None:
    """Says why an answer has no text, where it ended within its thought."""
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
