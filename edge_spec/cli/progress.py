"""Long work, shown on stderr: a bar in a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class ProgressBar:
    """A `Progress` that appears with the first report and disappears at the end."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, what: str, fraction: float) -> None:
        new = what not in self._tasks
        if not sys.stderr.isatty():
            if new:
                self._tasks[what] = None
                print(f"{what} ...", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        if new:
            self._tasks[what] = self._bar.add_task(what, total=1.0)
        self._bar.update(self._tasks[what], completed=fraction)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
