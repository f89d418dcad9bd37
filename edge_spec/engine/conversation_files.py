"""Whole conversations beside the kept prompts on disk: after a restart they go on as they were.

A prompt takes one up only where it goes on from the conversation's last prompt: then its state is
the one that would have been there without the restart. What else begins alike has the kept prompts,
whose states are those of reading them.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from edge_spec.engine.kept_conversations import (
    LEAST_TOKENS,
    LONGEST_TAIL,
    KeptConversation,
    common,
    goes_on,
)
from edge_spec.engine.prompt_files import CONVERSATION_SUFFIX, KeptPrompt, PromptFiles
from edge_spec.engine.snapshot_file import read_tokens
from edge_spec.errors import SnapshotError

_DIGITS = 32
_PROMPTED = "prompted"  # in a note


class ConversationFiles:
    """Those of one model, within the bound of `files`. Any thread may call."""

    def __init__(self, files: PromptFiles) -> None:
        self._files = files

    def take(self, prompt: np.ndarray, more_than: int) -> tuple[KeptConversation, int] | None:
        """Returns the one that shares most tokens with the prompt, if they are more than that, and
        how many. A damaged file is removed, which one line says."""
        found = [(common(tokens, prompt), path) for path, tokens in self._alike(prompt).items()]
        for shared, path in sorted(found, reverse=True):
            if shared <= more_than:
                break
            snapshot = self._files.read(path)
            if snapshot is None or common(snapshot.tokens, prompt) != shared:
                continue
            prompted = (snapshot.description.note or {}).get(_PROMPTED)
            if isinstance(prompted, int) and shared >= prompted - LONGEST_TAIL:
                noise = snapshot.description.noise
                kept = KeptConversation(snapshot.tokens, snapshot.cache, prompted, noise=noise)
                return kept, shared
        return None

    def write(self, kept: KeptConversation) -> None:
        """Writes it in another thread, and removes what it has gone on from, unless it cannot be
        kept."""
        name = f"{self._beginning(kept.tokens)}-{_digest(kept.tokens)}{CONVERSATION_SUFFIX}"
        path = self._files.directory / name
        earlier = [
            each
            for each, tokens in self._alike(kept.tokens).items()
            if each != path and goes_on(kept.tokens, tokens)
        ]
        note = {_PROMPTED: kept.num_prompted}
        is_kept = self._files.write({path: KeptPrompt(kept.tokens, kept.state, kept.noise, note)})
        for each in earlier if is_kept else ():
            with suppress(OSError):  # another process has removed it
                each.unlink()

    def _alike(self, tokens: np.ndarray) -> dict[Path, np.ndarray]:
        """Returns the tokens of those that begin like these, as their files say."""
        found = {}
        if len(tokens) >= LEAST_TOKENS:
            alike = f"{self._beginning(tokens)}-*{CONVERSATION_SUFFIX}"
            for path in self._files.directory.glob(alike):
                with suppress(SnapshotError, OSError):
                    found[path] = read_tokens(path)
        return found

    def _beginning(self, tokens: np.ndarray) -> str:
        return _digest(tokens[:LEAST_TOKENS], self._files.key)


def _digest(tokens: np.ndarray, key: str = "") -> str:
    return hashlib.sha256(key.encode() + tokens.astype("<i4").tobytes()).hexdigest()[:_DIGITS]
