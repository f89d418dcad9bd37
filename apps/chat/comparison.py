"""The same prompt with and without speculation."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_spec import SamplingParams
from edge_spec.apps.chat.conversation import ChatConversation, Message, OnChunk
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec import ChatOptions, GenerationResult

MOST_TOKENS = 128  # of each answer
REMEMBERING = "answers"  # the drafter that knows answers of before


@dataclass(frozen=True)
class DrafterComparison:
    """Three answers to one prompt: plain, with drafting, plain again, so that a machine that gets
    slower or faster all the while favours neither side.

    Rates are tokens a second of the rounds, the prompt's time left out.
    """

    drafter: str
    plain: tuple[GenerationResult, GenerationResult]
    drafted: GenerationResult

    @property
    def plain_per_second(self) -> float:
        milliseconds = sum(result.stats.predicted_ms for result in self.plain)
        tokens = sum(result.stats.predicted_n for result in self.plain)
        return tokens / milliseconds * 1e3 if milliseconds else 0.0

    @property
    def drafted_per_second(self) -> float:
        return self.drafted.stats.predicted_per_second

    @property
    def speedup(self) -> float | None:
        return self.drafted_per_second / self.plain_per_second if self.plain_per_second else None

    @property
    def may_be_remembered(self) -> bool:
        """Says whether the drafter knows the answer if it was given before."""
        return REMEMBERING in (*self.drafter.split(","), *self.drafted.stats.drafters)

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None where the texts are equal."""
        ids = [[token.id for token in each.tokens] for each in (self.plain[0], self.drafted)]
        if ids[0] == ids[1]:
            return None
        pairs = enumerate(zip(*ids, strict=False))
        return next((i for i, (plain, drafted) in pairs if plain != drafted), min(map(len, ids)))


def compare(
    conversation: ChatConversation,
    prompt: str | None,
    on_chunk: OnChunk,
    say: Callable[[str], None],
) -> DrafterComparison | None:
    """Answers the prompt, or the last one where it is None, after what was said before it; the
    conversation stays as it is. None where it was stopped.

    Raises UsageError where drafting is off or there is no prompt yet, EdgeSpecError.
    """
    engine = conversation.engine
    if engine.drafter == "none":
        raise UsageError("drafting is off", remedy="Turn it on first: /draft auto.")
    messages = _asked(conversation, prompt)
    options: ChatOptions = {**conversation.answering, "sampling": _seeded(conversation)}
    options["max_tokens"] = min(options.get("max_tokens") or MOST_TOKENS, MOST_TOKENS)
    results: list[GenerationResult] = []
    for number, drafting in enumerate((False, True, False), start=1):
        say(f"{number} of 3, {engine.drafter if drafting else 'plain'}")
        if drafting:
            results.append(conversation.generate(messages, on_chunk, options))
        else:
            with engine.without_drafting():
                results.append(conversation.generate(messages, on_chunk, options))
        if conversation.stop.requested:
            return None
    first, drafted, second = results
    return DrafterComparison(engine.drafter, (first, second), drafted)


def _asked(conversation: ChatConversation, prompt: str | None) -> list[Message]:
    if prompt is not None:
        return [*conversation.asked_messages, {"role": "user", "content": prompt}]
    last = {"role": "user", "content": conversation.last_prompt()}
    return [*conversation.before_last_prompt(), last]


def _seeded(conversation: ChatConversation) -> SamplingParams:
    """One seed for all three, since other random draws would make other texts."""
    sampling = conversation.answering.get("sampling", SamplingParams())
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(32))
