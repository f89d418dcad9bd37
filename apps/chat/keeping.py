"""Conversations in files: a snapshot of everything, or the messages alone as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_spec.apps.chat.conversation import ChatConversation, Message
from edge_spec.errors import UsageError
from edge_spec.storage.atomic import atomic_file

_ROLES = ("system", "user", "assistant")
_THOUGHT = "reasoning_content"


def save(conversation: ChatConversation, path: Path) -> str:
    """Writes the conversation, and says what was written: the messages alone if the name ends in
    .json, else a snapshot, which only this model can go on with, but at once. Raises EdgeSpecError,
    OSError.

    Replaces a file only where it holds a conversation that this one was saved to or loaded from.
    """
    if path.exists() and path.resolve() not in conversation.files:
        raise UsageError(f"{path} exists", remedy="Choose another name, or delete it first.")
    note = {"messages": conversation.messages}
    if path.suffix == ".json":
        with atomic_file(path, 0o600) as work:  # it is somebody's conversation
            work.write_text(json.dumps(note, ensure_ascii=False, indent=1), encoding="utf-8")
    else:
        conversation.engine.snapshot(path, note)
    conversation.files.add(path.resolve())
    return f"{_count(conversation)} saved in {path}."


def load(conversation: ChatConversation, path: Path) -> str:
    """Takes a saved conversation over. Raises EdgeSpecError, OSError, and then changes nothing."""
    if path.suffix == ".json":
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise _no_conversation(path, str(error)) from error
        messages = _messages(note, path)
    else:
        messages = _messages(conversation.engine.restore(path), path)
    conversation.take_over(messages)
    conversation.files.add(path.resolve())
    return f"{_count(conversation)} loaded from {path}."


def _messages(note: Any, path: Path) -> list[Message]:
    """Raises UsageError for what `save` does not write."""
    messages = note.get("messages") if isinstance(note, dict) else None
    if not isinstance(messages, list):
        raise _no_conversation(path, 'it has no "messages"')
    for index, message in enumerate(messages):
        known = isinstance(message, dict) and message.keys() - {_THOUGHT} == {"role", "content"}
        if not known or message["role"] not in _ROLES[index > 0 :]:
            raise _no_conversation(path, f"message {index + 1} has no known role")
        if not all(isinstance(text, str) for text in message.values()):
            raise _no_conversation(path, f"message {index + 1} has no text")
    return messages


def _no_conversation(path: Path, reason: str) -> UsageError:
    remedy = "Choose a file that /save wrote."
    return UsageError(f"{path} holds no conversation: {reason}", remedy=remedy)


def _count(conversation: ChatConversation) -> str:
    count = len(conversation.said)
    return "1 message" if count == 1 else f"{count} messages"
