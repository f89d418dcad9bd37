"""Ends a text at one of its lines, as llama.cpp's server does for editors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from edge_spec import Chunk, Generation

_INDENTATION = " \t"


@dataclass
class LineLimits:
    """Reads a text as it comes, and ends it once: before a line after the first one that is
    indented by less than `least_indent` characters, an empty one included, or after the line that
    is being written `seconds` after the text has begun. None, or 0: has no such limit.
    """

    least_indent: int | None = None
    seconds: float | None = None
    clock: Callable[[], float] = time.perf_counter
    text: str = ""  # that is shown
    has_ended: bool = False
    _held: str = ""  # a line break and what is known of the indentation after it
    _began: float | None = field(default=None)

    def push(self, piece: str) -> str:
        """Returns what of it is shown."""
        if self.has_ended:
            return ""
        now = self.clock()
        self._began = now if self._began is None else self._began
        shown = self._indented(piece) if self.least_indent else piece
        at = shown.find("\n") + 1
        if at and self.seconds and now - self._began > self.seconds:
            self.has_ended, self._held = True, ""
            shown = shown[:at]
        self.text += shown
        return shown

    def finish(self) -> str:
        """Returns what was held back, when no more comes."""
        held, self._held = self._held, ""
        self.text += held
        return held

    def _indented(self, piece: str) -> str:
        """Returns the text up to a line that is not indented enough."""
        text, self._held = self._held + piece, ""
        at = text.find("\n")
        while at >= 0:
            line = text[at + 1 :]
            indent = len(line) - len(line.lstrip(_INDENTATION))
            if indent == len(line):
                text, self._held = text[:at], text[at:]
                break
            if indent < (self.least_indent or 0):
                self.has_ended = True
                return text[: at + 1 + indent]
            at = text.find("\n", at + 1)
        return text


def limited(generation: Generation, limits: LineLimits) -> Iterator[Chunk]:
    """Yields an answer up to where its lines end it; its result then has that text, too."""
    for chunk in generation:
        yield replace(chunk, text=limits.push(chunk.text))
        if limits.has_ended:
            generation.cancel()
    if left := limits.finish():
        yield Chunk(left, ())
    generation.result.text = limits.text
