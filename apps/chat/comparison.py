"""The same prompt with and without speculation."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from edge_spec.apps.chat.conversation import ChatConversation, OnChunk
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec import ChatOptions, GenerationResult

MOST_TOKENS = 128  # of each answer
_REMEMBERING = "answers"  # the drafter that knows answers of before
_LEAST_COLUMN = 36  # two texts stand side by side where each gets as much


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
    again = prompt is None
    text = conversation.last_prompt() if prompt is None else prompt
    messages = conversation.messages_for(text, again=again)
    options: ChatOptions = {**conversation.answering}
    sampling = options["sampling"]
    if sampling.seed is None:  # one for all three, since other random draws make other texts
        sampling = replace(sampling, seed=secrets.randbits(32))
    options["sampling"] = sampling
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


def comparison_text(compared: DrafterComparison, width: int) -> RenderableType:
    """Both texts, side by side where there is room, then rates, their ratio and what differs."""
    drafter, result = compared.drafter, compared.drafted
    plain, drafted = compared.plain_per_second, result.stats.predicted_per_second
    panels = [_panel("plain", plain, compared.plain[0]), _panel(drafter, drafted, result)]
    speedup = f": {drafted / plain:.2f}x" if plain else ""
    lines = [
        f"{drafted:.1f} tokens/s with {drafter}, {plain:.1f} without{speedup}",
        _equality(compared),
        "Measured: three answers in turns, plain, drafting, plain; their rounds, without the "
        "time for the prompt.",
    ]
    if _REMEMBERING in (*drafter.split(","), *result.stats.drafters):
        lines.append("Its drafter remembers answers: one that was given before is drafted whole.")
    side_by_side = width >= 2 * _LEAST_COLUMN
    for panel in panels:
        panel.width = width // 2 - 1 if side_by_side else None
    texts = Columns(panels, padding=(0, 1)) if side_by_side else Group(*panels)
    return Group(texts, Text("\n".join(lines)))


def _panel(name: str, per_second: float, result: GenerationResult) -> Panel:
    title = Text(f"{name}: {per_second:.1f} tokens/s")
    thought, text = result.reasoning.strip(), result.text.strip()
    shown = Text.assemble((thought, "dim"), "\n\n" if thought and text else "", text)
    return Panel(shown, title=title, title_align="left")


def _equality(compared: DrafterComparison) -> str:
    index = compared.first_difference
    count = len(compared.drafted.tokens)
    if index is None:
        return f"The texts are equal, token by token ({count})."
    plain, drafted = (
        repr(result.tokens[index].text) if index < len(result.tokens) else "the end"
        for result in (compared.plain[0], compared.drafted)
    )
    line = f"The texts differ from token {index + 1} on: {plain} without, {drafted} with."
    ties = compared.drafted.stats.near_ties
    if ties:
        line += f" {ties} choices were near ties; /exact on decides them alike."
    return line
