"""Reads messages, streams answers, obeys /commands; in a terminal or through pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from edge_spec.apps.chat.conversation import ChatConversation, Opener
from edge_spec.apps.chat.lines import talk_in_lines
from edge_spec.apps.chat.paint import harmless

if TYPE_CHECKING:
    from edge_spec import AnswerOptions


def run(
    opener: Opener,
    model: str,
    exact: bool,
    answering: AnswerOptions,
    system: str | None,
    as_json: bool,
    asked_sampling: Mapping[str, float],
) -> None:
    """Opens the model and talks until /quit or the end of input. Raises EdgeSpecError.

    asked_sampling: what goes before how the model's makers mean its answers to be drawn.
    """
    talk = ChatConversation(opener, model, exact, answering, system, asked_sampling)
    with closing(talk) as conversation:
        engine = conversation.engine
        if sys.stdin.isatty() and not as_json:
            print(harmless(f"{engine.name} on {engine.runtime}. /help lists the commands."))
        if as_json or not _is_terminal():
            talk_in_lines(conversation, as_json=as_json)
        else:
            from edge_spec.apps.chat.terminal import Terminal

            Terminal(conversation).talk()


def _is_terminal() -> bool:
    """Says whether lines can be drawn over."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_dumb
