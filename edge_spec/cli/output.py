"""Print results as one JSON document or as lines for people, and progress on stderr.

Progress is a bar in a terminal, elsewhere a line a step with the time left.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json import dumps
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_spec.diagnostics.report_files import Page

_PIPE_COLUMNS = 10_000  # wide enough that no line of a pipe is folded
_EVERY_S = 15.0  # between progress lines outside a terminal
_TELLING = 0.02  # least fraction of the work from which to estimate the time left


def print_result(as_json: bool, document: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print the document, or the lines for people."""
    if as_json:
        print_json(document)
        return
    for line in lines:
        print(line)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one line of JSON and flush it, for a reader that waits for it."""
    text = dumps(document, ensure_ascii=False)
    # A lone surrogate has no UTF-8 encoding; "backslashreplace" writes JSON's own escape.
    print(text.encode("utf-8", "backslashreplace").decode("utf-8"), flush=True)


def table_lines(
    rows: Iterable[tuple[str, Sequence[str]]], headings: Sequence[str] = ()
) -> Iterator[str]:
    """Yield aligned columns; in a pipe each row is one line. rows: a style and its cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False, show_header=bool(headings))
    for style, cells in rows:
        # Text, so that rich reads no markup from drivers, servers or models.
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    for column in table.columns:
        column.overflow = "fold"
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    with console.capture() as captured:
        console.print(table)
    yield from map(str.rstrip, captured.get().splitlines())


def page_lines(page: Page) -> Iterator[str]:
    """Yield a report as lines: text folded between words, tables in columns."""
    for part in page:
        if isinstance(part, str):
            yield from table_lines([("", (part,))])
        else:
            styles = part.styles or [""] * len(part.rows)
            yield from table_lines(zip(styles, part.rows, strict=True), part.header)
        yield ""


def printable(text: str) -> str:
    """Replace control characters, which a model may have in tokens and names, by "?"."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


class ProgressBar:
    """Show progress from the first report on, and disappear at the end.

    Each step has one bar. A step is named by the text before " (": "Training (41 % accepted)" and
    "Training (42 % accepted)" are the same step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bar: Any = None
        self._tasks: dict[
            str, Any
        ] = {}  # rich's task number; outside a terminal (begin time, first, last fraction)
        self._told = 0.0  # time of the last line

    def __call__(self, what: str, fraction: float) -> None:
        step = what.partition(" (")[0]
        new = step not in self._tasks
        if not sys.stderr.isatty():
            self._print(what, fraction, step)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        if new:
            self._tasks[step] = self._bar.add_task(what, total=1.0)
        self._bar.update(self._tasks[step], completed=fraction, description=what)

    def _print(self, what: str, fraction: float, step: str) -> None:
        now = self._clock()
        begun_s, begun, last = self._tasks.get(step, (now, fraction, math.inf))
        begins = last == math.inf or (fraction < last and fraction < _TELLING)
        self._tasks[step] = (now, fraction, fraction) if begins else (begun_s, begun, fraction)
        if begins:
            print(f"{what} ...", file=sys.stderr, flush=True)
            self._told = now
            return
        if now - self._told >= _EVERY_S and fraction - begun >= _TELLING and fraction < 1:
            left_s = (now - begun_s) * (1 - fraction) / (fraction - begun)
            print(f"{what}: {fraction:.0%}, about {left_s:.0f} s left", file=sys.stderr, flush=True)
            self._told = now

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
