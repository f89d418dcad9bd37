"""Read messages, stream answers and run /commands, in a terminal or through pipes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from edge_spec import EdgeSpecError, PartKind
from edge_spec.apps.answering import Stop
from edge_spec.apps.chat.commands import CommandAnswer, Leave, run_command
from edge_spec.apps.chat.conversation import ChatConversation, Opener
from edge_spec.apps.chat.rendering import harmless, plain
from edge_spec.engine.results import cut_thought, thought_line

if TYPE_CHECKING:
    from edge_spec import Chunk
    from edge_spec.cli.options import SamplingOptions


def talk_in_lines(conversation: ChatConversation, *, as_json: bool) -> None:
    """Take each line of standard input as a message or command, until /quit or the end of input.

    as_json: print only one document, at the end. Raises EdgeSpecError if a message cannot be
    answered, unless input comes from a terminal, where the user can type another.
    """
    for line in iter(_read_line, ""):
        text = line.strip()
        try:
            with _interrupt_stops(conversation.stop):
                if text.startswith("/"):
                    if _command(conversation, text, as_json):
                        break
                elif text:
                    _answer(conversation, CommandAnswer(text), as_json)
        except EdgeSpecError as error:
            if not sys.stdin.isatty():
                _print_turns(conversation, as_json)
                raise
            print(f"edge-spec: {harmless(str(error))}", file=sys.stderr)
    _print_turns(conversation, as_json)


def _print_turns(conversation: ChatConversation, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"turns": conversation.turns}, ensure_ascii=False))


def _read_line() -> str:
    """Return "" at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _command(conversation: ChatConversation, line: str, as_json: bool) -> bool:
    """Return True if the line ends the conversation."""
    try:
        outcome = run_command(conversation, line)
    except (EdgeSpecError, OSError) as error:
        outcome = str(error)
    if isinstance(outcome, CommandAnswer):
        _answer(conversation, outcome, as_json)
    elif not isinstance(outcome, Leave):
        print(plain(outcome), end="", file=sys.stderr if as_json else sys.stdout)
    return isinstance(outcome, Leave)


def _answer(conversation: ChatConversation, message: CommandAnswer, as_json: bool) -> None:
    """Print the answer's text without its thought: unchanged to a pipe, made harmless for a
    terminal, which also shows how long the thought took."""
    is_terminal = sys.stdout.isatty()
    safe = harmless if is_terminal else str

    def show(chunk: Chunk) -> None:
        if chunk.kind is PartKind.TEXT:
            print(safe(chunk.text), end="", flush=True)

    note = conversation.make_room(message.text, again=message.again)
    if note is not None:
        print(f"edge-spec: {note}", file=sys.stderr)
    on_chunk = (lambda chunk: None) if as_json else show
    try:
        result = conversation.answer(message.text, on_chunk, again=message.again)
    finally:
        if not as_json:
            print(flush=True)
    if is_terminal and not as_json and result.reasoning_n:
        print(thought_line(result))
    if (note := cut_thought(result)) is not None:
        print(f"edge-spec: {note}", file=sys.stderr)


@contextmanager
def _interrupt_stops(stop: Stop) -> Iterator[None]:
    """Let the first Ctrl-C within the block stop what is running; a second one raises."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.request()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with stop.ready():
            yield
    finally:
        signal.signal(signal.SIGINT, previous)


def run(
    opener: Opener, model: str, asked: SamplingOptions, system: str | None, as_json: bool
) -> None:
    """Open the model and talk until /quit or the end of input. Raises EdgeSpecError."""
    with closing(ChatConversation(opener, model, asked, system)) as conversation:
        engine = conversation.engine
        if sys.stdin.isatty() and not as_json:
            for line in engine.plan:
                print(harmless(line))
            print(harmless(f"{engine.name} on {engine.runtime}. /help lists the commands."))
        if as_json or not _is_terminal():
            talk_in_lines(conversation, as_json=as_json)
        else:
            from edge_spec.apps.chat.terminal import Terminal

            Terminal(conversation).talk()


def _is_terminal() -> bool:
    """Return True if lines can be drawn over."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_dumb
