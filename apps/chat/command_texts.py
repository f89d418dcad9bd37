"""Writes what commands show of answers: figures, tokens by origin, comparisons."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from edge_spec.apps.chat.comparison import DrafterComparison
from edge_spec.apps.chat.paint import bar_character
from edge_spec.engine.thought_line import thought_line

if TYPE_CHECKING:
    from edge_spec import GenerationResult, Stats, Token

_BAR_WIDTH = 24
_LEAST_COLUMN = 36  # two texts stand side by side where each gets as much

# Style, and what stands around a token where there are no colours.
ORIGINS = {
    "plain": ("", "", ""),
    "accepted": ("green", "[", "]"),
    "recovered": ("yellow", "{", "}"),
    "bonus": ("cyan", "<", ">"),
}
MEANINGS = {
    "plain": "written without a draft token",
    "accepted": "drafted, and right",
    "recovered": "the model's own after a wrong draft token",
    "bonus": "the model's own after right draft tokens",
}


def stats_text(result: GenerationResult, sampling: str) -> str:
    """sampling: how the answer was drawn, in words."""
    stats = result.stats
    lines = [f"{stats.predicted_per_second:.1f} tokens/s over {stats.predicted_n} tokens"]
    if stats.speedup is not None:
        lines[0] += f", {stats.speedup:.2f}x the plain rounds of this session"
    if stats.acceptance_rate is not None:
        lines.append(
            f"accepted {stats.draft_n_accepted} of {stats.draft_n} draft tokens "
            f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens a round"
        )
    if stats.draft_characters:
        share = stats.draft_characters_accepted / stats.draft_characters
        lines[-1] += f"; {share:.0%} of their characters"
    if len(stats.drafters) > 1:
        lines += [
            f"  {name}: {counts.draft_n_accepted} of {counts.draft_n}"
            for name, counts in stats.drafters.items()
        ]
    if result.reasoning_n:
        lines.append(thought_line(result))
    reasons = ", ".join(f"{name} {count}" for name, count in stats.plain_reasons.items())
    if reasons:
        lines.append(f"{stats.plain_rounds} of {stats.rounds} rounds were plain: {reasons}")
    lines += _histogram(stats.acceptance_histogram)
    if stats.policy:
        lines.append(f"policy: {stats.policy}")
    lines.append(_promise(stats))
    if stats.kernels is not None:
        lines.append(stats.kernels)
    lines.append(f"sampling: {sampling}")
    lines.append(
        f"first token after {stats.ttft_ms:.0f} ms; prompt of {stats.prompt_n} tokens, "
        f"{stats.cached_n} of them from the cache"
    )
    return "\n".join(lines)


def _promise(stats: Stats) -> str:
    """Says what holds for greedy texts, and what that costs."""
    line = f"with and without drafting: {stats.lossless}"
    if stats.plain_width > 1:
        line += (
            f"; plain steps have {stats.plain_width} rows, at {stats.plain_cost:.2f} times the "
            "time of the fastest"
        )
        if stats.speedup_over_fastest_plain is not None:
            line += f" ({stats.speedup_over_fastest_plain:.2f}x those)"
    return line


def _histogram(rounds: Counter[int]) -> list[str]:
    """rounds: speculative ones by number of accepted draft tokens."""
    if not rounds:
        return []
    most = max(rounds.values())
    lines = ["speculative rounds by accepted draft tokens:"]
    for accepted, count in sorted(rounds.items()):
        bar = bar_character() * max(round(count / most * _BAR_WIDTH), 1)
        lines.append(f"  {accepted:2} {bar:{_BAR_WIDTH}} {count}")
    return lines


def tokens_text(result: GenerationResult, colours: bool) -> Text:
    """The answer with each token marked by its origin, and below it a legend with counts."""
    text = Text()
    for token in result.tokens:
        _append(text, token.text, token.origin.value, colours)
    counts = Counter(token.origin.value for token in result.tokens)
    text.append("\n")
    for origin, meaning in MEANINGS.items():
        text.append("\n")
        _append(text, origin, origin, colours)
        text.append(f" {counts[origin]}: {meaning}")
    drafted = Counter(token.drafter for token in result.tokens if token.drafter)
    if drafted:
        by_drafter = ", ".join(f"{name} {count}" for name, count in drafted.most_common())
        text.append(f"\nright draft tokens of: {by_drafter}")
    return text


def _append(text: Text, piece: str, origin: str, colours: bool) -> None:
    style, opening, closing = ORIGINS[origin]
    if colours:
        text.append(piece, style)
    elif piece:
        text.append(f"{opening}{piece}{closing}")


def has_colours(is_terminal: bool) -> bool:
    """NO_COLOR: https://no-color.org."""
    return is_terminal and not os.environ.get("NO_COLOR")


def comparison_text(compared: DrafterComparison, width: int) -> RenderableType:
    """Both texts, side by side where there is room, then rates, their ratio and what differs."""
    plain, drafted = compared.plain_per_second, compared.drafted_per_second
    panels = [
        _panel("plain", plain, compared.plain[0]),
        _panel(compared.drafter, drafted, compared.drafted),
    ]
    lines = [f"{drafted:.1f} tokens/s with {compared.drafter}, {plain:.1f} without"]
    if compared.speedup is not None:
        lines[0] += f": {compared.speedup:.2f}x"
    lines.append(_equality(compared))
    lines.append(
        "Measured: three answers in turns, plain, drafting, plain; their rounds, without the "
        "time for the prompt."
    )
    if compared.may_be_remembered:
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
        _quoted(result.tokens[index : index + 1])
        for result in (compared.plain[0], compared.drafted)
    )
    line = f"The texts differ from token {index + 1} on: {plain} without, {drafted} with."
    ties = compared.drafted.stats.near_ties
    if ties:
        line += f" {ties} choices were near ties; /exact on decides them alike."
    return line


def _quoted(tokens: list[Token]) -> str:
    return repr(tokens[0].text) if tokens else "the end"
