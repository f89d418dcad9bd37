"""Places in this repository's own files whose text is asked for, drawn by a seed."""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KINDS = ("line", "middle", "body")
_LEAST_LINES = 60  # of a file that is cut


@dataclass(frozen=True)
class Place:
    """A file without the text that is asked for."""

    kind: str
    path: Path
    before: str
    after: str
    missing: str  # between them

    def body(self, arguments: argparse.Namespace) -> dict[str, Any]:
        return {
            "input_prefix": "".join(
                self.before.splitlines(keepends=True)[-arguments.prefix_lines :]
            ),
            "input_suffix": "".join(self.after.splitlines(keepends=True)[: arguments.suffix_lines]),
            "input_extra": other_files(self.path, arguments.files, arguments.prefix_lines),
            "n_predict": arguments.tokens,
            "temperature": 0,
        }

    def is_right(self, text: str) -> bool:
        """Says whether the first line of a text is that of the file."""
        first, expected = (each.lstrip("\n").split("\n")[0] for each in (text, self.missing))
        return first == expected


def source_files() -> list[Path]:
    """Returns those of the package that are long enough, in a fixed order."""
    listed = subprocess.run(
        ["git", "ls-files", "edge_spec", "apps", "runtimes", "exporters"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout.split()
    paths = [ROOT / name for name in sorted(listed) if name.endswith(".py")]
    return [path for path in paths if len(path.read_text().splitlines()) >= _LEAST_LINES]


def other_files(path: Path, count: int, lines: int) -> list[dict[str, str]]:
    """Returns the beginnings of others of the same folder."""
    beside = [each for each in sorted(path.parent.glob("*.py")) if each != path][:count]
    return [
        {"filename": each.name, "text": "".join(each.read_text().splitlines(True)[:lines])}
        for each in beside
    ]


def places(count: int, seed: int) -> list[Place]:
    """Returns as many of each kind."""
    draw, files = random.Random(seed), source_files()
    found: list[Place] = []
    for kind in KINDS:
        while sum(place.kind == kind for place in found) < count:
            path = draw.choice(files)
            place = _cut(kind, path, draw)
            if place is not None:
                found.append(place)
    return found


def _cut(kind: str, path: Path, draw: random.Random) -> Place | None:
    text = path.read_text()
    if kind == "body":
        span = _body(text, draw)
        return None if span is None else _place(kind, path, text, *span)
    lines = text.splitlines(keepends=True)
    number = draw.randrange(20, len(lines) - 5)
    line = lines[number].rstrip("\n")
    if len(line.strip()) < 10:
        return None
    start = sum(map(len, lines[:number]))
    end = start + len(line)
    if kind == "line":
        after = end + sum(map(len, lines[number + 1 : number + 1 + draw.randrange(1, 5)]))
        return _place(kind, path, text, end, after)
    return _place(kind, path, text, start + draw.randrange(len(line) // 2, len(line)), end)


def _place(kind: str, path: Path, text: str, begin: int, end: int) -> Place:
    return Place(kind, path, text[:begin], text[end:], text[begin:end])


def _body(text: str, draw: random.Random) -> tuple[int, int] | None:
    """Returns where the statements of a function begin and end, without its docstring."""
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and 3 <= (node.end_lineno or 0) - body[0].lineno <= 20:
                found.append((body[0].lineno - 1, node.end_lineno or 0, body[0].col_offset))
    if not found:
        return None
    first, last, indent = draw.choice(sorted(found))
    return sum(map(len, lines[:first])) + indent, sum(map(len, lines[:last]))


def typed(place: Place, step: int) -> Iterator[tuple[str, str, str]]:
    """Yields the texts around the cursor while the end of the line before it is typed."""
    before, _, line = place.before.rpartition("\n")
    for length in range(0, len(line) + 1, step):
        yield f"{before}\n", line[:length], place.after
