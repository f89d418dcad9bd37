"""The results of a generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from edge_spec.core.metrics import Stats
from edge_spec.engine.token_origin import Origin as Origin


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # the model ended its text, or a stop string appeared
    LENGTH = "length"  # max_tokens or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"  # the model failed; what it wrote before stays


@dataclass(frozen=True)
class Alternative:
    """A token that the model found likely where another one may have been written."""

    id: int
    text: str  # special tokens have none
    logprob: float


@dataclass(frozen=True)
class Token:
    """`text` is what the token added to the text: "" for special tokens and for all but the
    last token of a character.

    `logprob` is the natural logarithm of its probability by the model itself, at temperature 1,
    before penalties and grammar; `alternatives` are the likeliest tokens in its place.
    """

    id: int
    text: str
    origin: Origin
    drafter: str = ""  # whose draft token was accepted, several joined by "+"
    logprob: float | None = None  # where it was asked for
    alternatives: tuple[Alternative, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        named = {"drafter": self.drafter} if self.drafter else {}
        scored: dict[str, Any] = {}
        if self.logprob is not None:
            listed = [asdict(alternative) for alternative in self.alternatives]
            scored = {"logprob": self.logprob, "alternatives": listed}
        return {"id": self.id, "text": self.text, "origin": self.origin.value, **named, **scored}


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: the text of one round or more."""

    text: str
    tokens: tuple[Token, ...]


@dataclass
class GenerationResult:
    """A finished generation; while one is streamed, what there is of it so far."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)
    seed: int | None = None  # of the random draws, where there were any

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason and self.finish_reason.value,
            "tokens": [token.to_dict() for token in self.tokens],
            "stats": self.stats.to_dict(),
            "seed": self.seed,
        }
