"""Reads messages, streams answers, obeys /commands; in a terminal or through pipes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from edge_spec import EdgeSpecError, PartKind
from edge_spec.apps.answering import Stop
from edge_spec.apps.chat.commands import CommandAnswer, Door, Leave, run_command
from edge_spec.apps.chat.conversation import ChatConversation, Opener
from edge_spec.apps.chat.rendering import harmless, plain
from edge_spec.engine.results import cut_thought, thought_line

if TYPE_CHECKING:
    from edge_spec import ChatOptions, Chunk


def talk_in_lines(conversation: ChatConversation, *, as_json: bool) -> None:
    """Take each line of standard input as a message or a command until /quit or its end.

    as_json: print one document at the end and nothing else. Raises EdgeSpecError for a message that
    cannot be answered, unless a person is there to type another.
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
    """Return whether the line ends the conversation."""
    try:
        outcome = run_command(conversation, line, Door())
    except (EdgeSpecError, OSError) as error:
        outcome = str(error)
    if isinstance(outcome, CommandAnswer):
        _answer(conversation, outcome, as_json)
    elif not isinstance(outcome, Leave):
        print(plain(outcome), end="", file=sys.stderr if as_json else sys.stdout)
    return isinstance(outcome, Leave)


def _answer(conversation: ChatConversation, message: CommandAnswer, as_json: bool) -> None:
    writer = AnswerWriter(conversation, sys.stdout.isatty())
    note = conversation.make_room(message.text, again=message.again)
    if note is not None:
        print(f"edge-spec: {note}", file=sys.stderr)
    try:
        show = (lambda chunk: None) if as_json else writer.write
        result = conversation.answer(message.text, show, again=message.again)
    finally:
        if not as_json:
            writer.finish()
    if (note := cut_thought(result)) is not None:
        print(f"edge-spec: {note}", file=sys.stderr)


class AnswerWriter:
    """Writes an answer as it comes: its text alone to a pipe; a terminal that cannot be drawn over
    is told of thoughts and calls, a line each."""

    def __init__(self, conversation: ChatConversation, to_terminal: bool) -> None:
        self._conversation = conversation
        self._to_terminal = to_terminal
        self._has_thought = False

    def write(self, chunk: Chunk) -> None:
        if chunk.kind is PartKind.REASONING:
            self._has_thought = self._has_thought or bool(chunk.text.strip())
            return
        self._end_thought()
        if self._to_terminal and chunk.call is not None:
            print(harmless(f"\nCall of {chunk.call.name}: "), end="")
        if chunk.kind is PartKind.TEXT or self._to_terminal:
            print(harmless(chunk.text) if self._to_terminal else chunk.text, end="", flush=True)

    def finish(self) -> None:
        self._end_thought()
        print(flush=True)

    def _end_thought(self) -> None:
        result = self._conversation.running or self._conversation.last
        if self._to_terminal and self._has_thought and result is not None:
            print(thought_line(result), flush=True)
        self._has_thought = False


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
    opener: Opener,
    model: str,
    exact: bool,
    answering: ChatOptions,
    system: str | None,
    as_json: bool,
    asked_sampling: Mapping[str, float],
) -> None:
    """Open the model and talk until /quit or the end of input. Raises EdgeSpecError.

    asked_sampling: overrides the sampling that the model's makers recommend.
    """
    talk = ChatConversation(opener, model, exact, answering, system, asked_sampling)
    with closing(talk) as conversation:
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
    """Return whether lines can be drawn over."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_dumb
