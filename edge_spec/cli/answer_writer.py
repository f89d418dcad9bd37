"""Writes an answer to standard output while it comes: its text, and in a terminal what is thought
before it, which becomes one line when it has ended."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from edge_spec.engine.thought_line import thought_line
from edge_spec.text.parts.part import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_spec.engine.results import Chunk, GenerationResult

_MAX_ROWS = 10  # of a thought that is being written
_ROWS_BELOW = 2
_EVERY_S = 0.2  # at most: drawing takes the interpreter from the model


class AnswerWriter:
    """A pipe gets the text alone."""

    def __init__(
        self, result: GenerationResult, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """result: of the answer, which grows with each chunk."""
        self._result = result
        self._clock = clock
        self._not_before = 0.0  # a thought is drawn again
        self._live: Any = None  # what shows the thought that is being written
        self._is_thinking = False

    def write(self, chunk: Chunk) -> None:
        if chunk.kind is PartKind.REASONING:
            self._is_thinking = True
            if sys.stdout.isatty() and self._clock() >= self._not_before:
                self._show_thought()
                self._not_before = self._clock() + _EVERY_S
            return
        self._fold()
        if chunk.kind is PartKind.TEXT:
            print(chunk.text, end="", flush=True)

    def finish(self) -> None:
        """Ends the line, also of an answer that was interrupted."""
        self._fold()
        print()

    def _show_thought(self) -> None:
        """Draws its last lines over those of before."""
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            console = Console(highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        console = self._live.console
        rows = max(min(console.height - _ROWS_BELOW, _MAX_ROWS), 1)
        # No more than these rows could show.
        end = self._result.reasoning[-rows * console.width :]
        text = Text("".join(c if c.isprintable() or c == "\n" else " " for c in end))
        lines = text.wrap(console, console.width)[-rows:]
        self._live.update(Text("\n", "dim").join(lines), refresh=True)

    def _fold(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            if self._result.reasoning.strip():
                live.console.print(thought_line(self._result), style="dim")
