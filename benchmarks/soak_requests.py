"""Defines what a soak run asks for, and outcomes: shared by the process that judges and the
one that asks the SDK."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from common import OWN_PROMPTS, read_prompts

ANSWER_TOKENS = 40
SEEDS = 3
NUM_PROMPTS = 10
FOLLOW_UPS = ("Tell me more.", "Why is that?", "Give an example.", "Say it in one sentence.")
NUM_CONVERSATIONS = 3
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40}
DRAFTERS = ("none", "auto", "suffix", "recycling", "lookahead", "suffix,recycling")
DRAFTERS_OF_PAIR = (*DRAFTERS, "draft-model", "draft-model,suffix")
FILLER = "The quick brown fox jumps over the lazy dog, and number {number} follows. "


@dataclass(frozen=True)
class Outcome:
    """Holds what came of one request. key: what was asked, the same for the same request whichever
    way it came; None where the text is not compared. sampled: with a seed, else greedily."""

    kind: str
    key: str | None = None
    text: str = ""
    error: str | None = None
    sampled: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def prompts() -> list[str]:
    return [entry["prompt"] for entry in read_prompts(OWN_PROMPTS)][:NUM_PROMPTS]


def opening(number: int) -> list[dict[str, str]]:
    """The first message of a conversation that grows until its context is full."""
    return [{"role": "user", "content": f"Tell me a fact about the number {number + 2}."}]


def key(exact: bool, *what: object) -> str:
    """Exact mode may write another text: it is bit-identical to plain decoding in its own mode."""
    return json.dumps([exact, *what])
