"""Slash commands, in one table from which help, completion and docs are made, and their output."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from edge_spec.apps.chat.conversation import ChatConversation, load, save
from edge_spec.apps.chat.rendering import dim
from edge_spec.engine.results import thought_line
from edge_spec.errors import UsageError
from edge_spec.storage.atomic import expanded
from edge_spec.text.parts.answer_form import read_reasoning

if TYPE_CHECKING:
    from edge_spec import GenerationResult, Stats

KEYS = """\
Ctrl-C stops an answer and keeps what came; twice at an empty line leaves.
Alt-Enter begins a new line, Tab completes, Ctrl-R searches what you typed before."""
_NO_ANSWER = "No answer yet."

# Origins of tokens: style, brackets to use without colours, meaning.
_ORIGINS = {
    "plain": ("", "", "", "written without a draft token"),
    "accepted": ("green", "[", "]", "drafted, and right"),
    "recovered": ("yellow", "{", "}", "the model's own after a wrong draft token"),
    "bonus": ("cyan", "<", ">", "the model's own after right draft tokens"),
}


@dataclass(frozen=True)
class CommandAnswer:
    """A message for the model to answer. again: in place of the last one."""

    text: str
    again: bool = False


class Leave:
    """The end of the conversation."""


Outcome = RenderableType | CommandAnswer | Leave


@dataclass(frozen=True)
class Command:
    usage: str  # as help shows it: name, then argument
    help: str
    act: Callable[[ChatConversation, str], Outcome]
    during_answer: bool = False  # allowed while an answer is being written
    takes_path: bool = False  # and is slow, so another thread runs it and the line stays usable

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]

    def choices(self, talk: ChatConversation) -> list[str]:
        words = self.usage.partition(" ")[2].strip("[]").split("|")
        drafters = talk.engine.drafters if self.act is _draft else []
        return [*filter(str.islower, words), *drafters]


def run_command(conversation: ChatConversation, line: str) -> Outcome:
    """Run a command. If it raises EdgeSpecError or OSError, the conversation is unchanged."""
    name, _, argument = line.strip().partition(" ")
    command = find(name)
    if command is None:
        return f"There is no {name}.\n{help_text()}"
    return command.act(conversation, argument.strip())


def find(name: str) -> Command | None:
    name = {"/exit": "/quit"}.get(name, name)
    return next((command for command in COMMANDS if command.name == name), None)


def help_text() -> str:
    width = max(len(command.usage) for command in COMMANDS)
    lines = [f"{command.usage:{width}}  {command.help}" for command in COMMANDS]
    return "\n".join([*lines, KEYS])


def _draft(talk: ChatConversation, argument: str) -> Outcome:
    if argument:
        talk.engine.set_drafter({"off": "none", "on": "auto"}.get(argument, argument))
    names = talk.engine.drafter
    return f"Speculation: {'off' if names == 'none' else names}."


def _tokens(talk: ChatConversation, argument: str) -> Outcome:
    if talk.last is None:
        return _NO_ANSWER
    has_colours = talk.is_terminal and not os.environ.get("NO_COLOR")  # https://no-color.org

    def append(piece: str, origin: str) -> None:
        style, opening, closing, _ = _ORIGINS[origin]
        if has_colours:
            text.append(piece, style)
        elif piece:
            text.append(f"{opening}{piece}{closing}")

    text, tokens = Text(), talk.last.tokens
    for token in tokens:
        append(token.text, token.origin.value)
    counts = Counter(token.origin.value for token in tokens)
    text.append("\n")
    for origin, (*_, meaning) in _ORIGINS.items():
        text.append("\n")
        append(origin, origin)
        text.append(f" {counts[origin]}: {meaning}")
    drafted = Counter(token.drafter for token in tokens if token.drafter)
    if drafted:
        by_drafter = ", ".join(f"{name} {count}" for name, count in drafted.most_common())
        text.append(f"\nright draft tokens of: {by_drafter}")
    return text


def _stats(talk: ChatConversation, argument: str) -> Outcome:
    plan = "\n".join(talk.engine.plan)
    if talk.last is None:
        return f"{plan}\n{_NO_ANSWER}" if plan else _NO_ANSWER
    return f"{plan}\n{stats_text(talk.last, talk.last_sampling)}".lstrip()


def _thoughts(talk: ChatConversation, argument: str) -> Outcome:
    result = talk.running or talk.last
    if result is None:
        return _NO_ANSWER
    thought = result.reasoning.strip()
    return (
        dim(f"{thought}\n\n{thought_line(result)}")
        if thought
        else "The last answer has no thought."
    )


def _reasoning(talk: ChatConversation, argument: str) -> Outcome:
    if argument:
        talk.reasoning = read_reasoning(argument)
    return f"Reasoning: {talk.reasoning}."


def _reset(talk: ChatConversation, argument: str) -> Outcome:
    talk.forget()
    return "The conversation is forgotten."


def _system(talk: ChatConversation, argument: str) -> Outcome:
    if argument:
        talk.system = None if argument == "none" else argument
    return f"System message: {talk.system or 'none'}"


def _path(argument: str) -> Path:
    if not argument:
        raise UsageError("a file is missing", remedy="Name one, such as talk.json.")
    return expanded(Path(argument))


def _model(talk: ChatConversation, argument: str) -> Outcome:
    if argument:
        talk.open(argument)
    return f"{talk.engine.name} on {talk.engine.runtime}."


def _plain(talk: ChatConversation, argument: str) -> Outcome:
    if argument not in ("", "on", "off"):
        raise UsageError(f"{argument!r} is neither on nor off", remedy="Choose one of them.")
    if argument:
        talk.is_plain = argument == "on"
    return f"Markdown is shown {'as text' if talk.is_plain else 'formatted'}."


COMMANDS = (
    Command("/draft auto|none|NAME", "who drafts, from the next round on", _draft, True),
    Command("/tokens", "the last answer, each token by its origin", _tokens, True),
    Command("/stats", "figures of the last answer", _stats, True),
    Command("/thoughts", "what was thought before the last answer", _thoughts, True),
    Command(
        "/reasoning auto|off|N",
        "whether answers begin with a thought, of N tokens at most",
        _reasoning,
    ),
    Command(
        "/retry",
        "answer the last message again",
        lambda talk, _: CommandAnswer(talk.last_prompt(), again=True),
    ),
    Command(
        "/undo",
        "take the last message back, with its answer",
        lambda talk, _: f"Taken back, with its answer: {talk.take_back()}",
    ),
    Command("/reset", "forget the conversation", _reset),
    Command("/system [TEXT|none]", "the system message from now on", _system),
    Command(
        "/save FILE",
        "keep it in a file; .json: its messages alone",
        lambda talk, argument: save(talk, _path(argument)),
        takes_path=True,
    ),
    Command(
        "/load FILE",
        "go on with a saved conversation",
        lambda talk, argument: load(talk, _path(argument)),
        takes_path=True,
    ),
    Command("/model NAME", "go on with another model", _model, takes_path=True),
    Command("/plain on|off", "show Markdown as text, or formatted", _plain),
    Command("/help", "this list", lambda *_: help_text(), True),
    Command("/quit", "leave (also Ctrl-D)", lambda *_: Leave(), True),
)


def stats_text(result: GenerationResult, sampling: str) -> str:
    """Return the figures of an answer as lines. sampling: describes how it was drawn."""
    stats = result.stats
    lines = [f"{stats.predicted_per_second:.1f} tokens/s over {stats.predicted_n} tokens"]
    if stats.speedup is not None:
        lines[0] += f", {stats.speedup:.2f}x the plain rounds of this session"
    if stats.acceptance_rate is not None:
        lines.append(
            f"accepted {stats.draft_n_accepted} of {stats.draft_n} draft tokens "
            f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens a round"
        )
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
    """Say how greedy output relates to plain decoding, and what that costs."""
    line = f"with and without drafting: {stats.lossless}"
    if stats.plain_width > 1:
        line += (
            f"; plain steps have {stats.plain_width} rows, at {stats.plain_cost:.2f} times the "
            "time of the fastest"
        )
        if stats.speedup_over_fastest_plain is not None:
            line += f" ({stats.speedup_over_fastest_plain:.2f}x those)"
    return line
