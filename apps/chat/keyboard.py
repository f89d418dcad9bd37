"""Helps with typing: completes commands, and keeps the history of what was typed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from edge_spec.apps.chat.commands import COMMANDS, find
from edge_spec.apps.chat.conversation import ChatConversation
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.locks import locked

_MAX_HISTORY_BYTES = 1_000_000
_LOCK_S = 1.0


class CommandCompleter(Completer):
    """Commands, their choices (of several joined by commas the last one) and paths."""

    def __init__(self, conversation: ChatConversation) -> None:
        self._conversation = conversation
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/"):
            return
        name, space, argument = typed.partition(" ")
        command = find(name)
        if not space:
            for each in COMMANDS:
                if each.name.startswith(name):
                    yield Completion(each.name, -len(name), display_meta=each.help)
        elif command is not None:
            word = argument.rpartition(",")[2]
            for choice in command.choices(self._conversation):
                if choice.startswith(word):
                    yield Completion(choice, -len(word))
            if command.takes_path:
                yield from self._paths.get_completions(Document(argument), event)


class OwnHistory(FileHistory):
    """A file that nobody else reads; where it cannot be written, typing goes on without."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))


def open_history() -> History:
    """Opens the history of all conversations, beside converted models; in memory where there can be
    no file."""
    path = cache_directory() / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return OwnHistory(path)


def _shorten(path: Path) -> None:
    """Drops the older half of a long history, at the beginning of an entry."""
    if path.stat().st_size <= _MAX_HISTORY_BYTES:
        return
    with locked(path, _LOCK_S):
        content = path.read_bytes()[-_MAX_HISTORY_BYTES // 2 :]
        entry = content.find(b"\n\n# ")  # its time, before its lines
        with atomic_file(path, 0o600) as work:
            work.write_bytes(content[entry + 1 :])
