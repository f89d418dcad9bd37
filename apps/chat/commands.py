"""Lines that begin with a slash: one table, of which help, completion and docs are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rich.console import RenderableType

from edge_spec.apps.chat import keeping
from edge_spec.apps.chat.command_texts import comparison_text, has_colours, stats_text, tokens_text
from edge_spec.apps.chat.comparison import compare
from edge_spec.apps.chat.conversation import ChatConversation, OnChunk, Report
from edge_spec.apps.chat.thoughts import unfolded
from edge_spec.errors import UsageError
from edge_spec.storage.atomic import expanded
from edge_spec.text.thoughts import read_reasoning

KEYS = """\
Ctrl-C stops an answer and keeps what came; twice at an empty line leaves.
Alt-Enter begins a new line, Tab completes, Ctrl-R searches what you typed before."""


@dataclass(frozen=True)
class CommandAnswer:
    """A message that the model is to answer; again: in place of the last one."""

    text: str
    again: bool = False


class Leave:
    """The end of the conversation."""


Outcome = RenderableType | CommandAnswer | Leave


@dataclass(frozen=True)
class Door:
    """Describes the terminal or pipe that a command was typed into."""

    width: int = 80
    is_terminal: bool = False
    report: Report | None = None  # None: progress goes to stderr
    on_chunk: OnChunk = field(default=lambda chunk: None)


class Runs(Enum):
    """Says when a command is carried out."""

    ANY_TIME = "also during an answer"
    AT_ONCE = "between answers"
    LONG = "between answers, and may take its time"


Act = Callable[[ChatConversation, str, Door], Outcome]


@dataclass(frozen=True)
class Command:
    name: str
    argument: str  # as help shows it
    help: str
    act: Act
    runs: Runs = Runs.AT_ONCE
    choices: Callable[[ChatConversation], Sequence[str]] = (
        lambda conversation: ()
    )  # of its argument
    takes_path: bool = False

    @property
    def usage(self) -> str:
        return f"{self.name} {self.argument}".rstrip()


def run_command(conversation: ChatConversation, line: str, door: Door) -> Outcome:
    """Carries the line out. Raises EdgeSpecError, OSError: the conversation is as it was."""
    name, _, argument = line.strip().partition(" ")
    command = find(name)
    if command is None:
        return f"There is no {name}.\n{help_text()}"
    return command.act(conversation, argument.strip(), door)


def find(name: str) -> Command | None:
    name = {"/exit": "/quit"}.get(name, name)
    return next((command for command in COMMANDS if command.name == name), None)


def help_text() -> str:
    width = max(len(command.usage) for command in COMMANDS)
    lines = [f"{command.usage:{width}}  {command.help}" for command in COMMANDS]
    return "\n".join([*lines, KEYS])


def _help(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    return help_text()


def _draft(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    if argument:
        conversation.engine.set_drafter({"off": "none", "on": "auto"}.get(argument, argument))
    names = conversation.engine.drafter
    return f"Speculation: {'off' if names == 'none' else names}."


def _compare(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    def say(what: str) -> None:
        if door.report is not None:
            door.report(f"Comparing, {what}", 0.0)

    compared = compare(conversation, argument or None, door.on_chunk, say)
    return "Stopped." if compared is None else comparison_text(compared, door.width)


def _tokens(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    if conversation.last is None:
        return "No answer yet."
    return tokens_text(conversation.last, has_colours(door.is_terminal))


def _stats(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    if conversation.last is None:
        return "No answer yet."
    return stats_text(conversation.last, conversation.last_sampling)


def _thoughts(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    return unfolded(conversation.running or conversation.last)


def _reasoning(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    if argument:
        conversation.reasoning = read_reasoning(argument)
    return f"Reasoning: {conversation.reasoning}."


def _undo(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    text = conversation.take_back()
    return f"Taken back, with its answer: {text}"


def _retry(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    return CommandAnswer(conversation.last_prompt(), again=True)


def _reset(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    conversation.forget()
    return "The conversation is forgotten."


def _system(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    if argument:
        conversation.system = None if argument == "none" else argument
    return f"System message: {conversation.system or 'none'}"


def _save(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    return keeping.save(conversation, _path(argument))


def _load(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    return keeping.load(conversation, _path(argument))


def _path(argument: str) -> Path:
    if not argument:
        raise UsageError("a file is missing", remedy="Name one, such as talk.json.")
    return expanded(Path(argument))


def _model(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    if argument:
        conversation.open(argument, door.report)
    return f"{conversation.engine.name} on {conversation.engine.runtime}."


def _exact(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    wanted = _switched(argument, conversation.exact)
    if wanted != conversation.exact:
        conversation.set_exact(wanted, door.report)
    return f"Exact mode: {'on' if wanted else 'off'}."


def _plain(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    conversation.is_plain = _switched(argument, conversation.is_plain)
    return f"Markdown is shown {'as text' if conversation.is_plain else 'formatted'}."


def _switched(argument: str, now: bool) -> bool:
    if argument not in ("", "on", "off"):
        raise UsageError(f"{argument!r} is neither on nor off", remedy="Choose one of them.")
    return argument == "on" if argument else now


def _quit(conversation: ChatConversation, argument: str, door: Door) -> Outcome:
    return Leave()


def _drafters(conversation: ChatConversation) -> list[str]:
    return ["auto", "none", *conversation.engine.drafters]


def _on_off(conversation: ChatConversation) -> list[str]:
    return ["on", "off"]


COMMANDS = (
    Command(
        "/draft",
        "auto|none|NAME",
        "who drafts, from the next round on",
        _draft,
        Runs.ANY_TIME,
        _drafters,
    ),
    Command(
        "/compare",
        "[TEXT]",
        "answer TEXT, or the last message, with and without speculation",
        _compare,
        Runs.LONG,
    ),
    Command("/tokens", "", "the last answer, each token by its origin", _tokens, Runs.ANY_TIME),
    Command("/stats", "", "figures of the last answer", _stats, Runs.ANY_TIME),
    Command("/thoughts", "", "what was thought before the last answer", _thoughts, Runs.ANY_TIME),
    Command(
        "/reasoning",
        "auto|off|N",
        "whether answers begin with a thought, of N tokens at most",
        _reasoning,
        choices=lambda conversation: ("auto", "off"),
    ),
    Command("/retry", "", "answer the last message again", _retry),
    Command("/undo", "", "take the last message back, with its answer", _undo),
    Command("/reset", "", "forget the conversation", _reset),
    Command("/system", "[TEXT|none]", "the system message from now on", _system),
    Command(
        "/save",
        "FILE",
        "keep it in a file; .json: its messages alone",
        _save,
        Runs.LONG,
        takes_path=True,
    ),
    Command("/load", "FILE", "go on with a saved conversation", _load, Runs.LONG, takes_path=True),
    Command("/model", "NAME", "go on with another model", _model, Runs.LONG, takes_path=True),
    Command(
        "/exact",
        "on|off",
        "bit-identical to plain decoding; opens the model again",
        _exact,
        Runs.LONG,
        _on_off,
    ),
    Command("/plain", "on|off", "show Markdown as text, or formatted", _plain, choices=_on_off),
    Command("/help", "", "this list", _help, Runs.ANY_TIME),
    Command("/quit", "", "leave (also Ctrl-D)", _quit, Runs.ANY_TIME),
)
