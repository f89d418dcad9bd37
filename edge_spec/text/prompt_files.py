"""Benchmark prompts: our own, or a file's."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from edge_spec.errors import UsageError, readable

# Six in each of Spec-Bench's categories (Xia et al. 2024), about as long as its own.
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
MAX_BYTES = 100_000_000


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    text: str


def read_prompts(path: Path, per_category: int | None = None) -> list[Prompt]:
    """Read JSON lines with `id`, `category` and `prompt` (or the first of Spec-Bench's `turns`), or
    a .txt file's lines; keep `per_category` of each. Raises UsageError."""
    try:
        with path.open("rb") as file:  # a device may be endless
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(
                f"{path} is larger than {MAX_BYTES // 10**6} MB",
                remedy="Give fewer prompts.",
            )
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read prompts from {path}: {error}",
            remedy="Give a file of JSON lines, or leave --prompts out.",
        ) from None
    found: list[Prompt] = []
    counts: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompt = Prompt(str(number), readable(path.stem), line.strip())
        else:
            prompt = _parse(line, f"line {number} of {path}")
        counts[prompt.category] += 1
        if per_category is None or counts[prompt.category] <= per_category:
            found.append(prompt)
    if not found:
        raise UsageError(f"{path} has no prompts", remedy="Give one a line.")
    return found


def _parse(line: str, where: str) -> Prompt:
    form = 'A line is {"id": ..., "category": "...", "prompt": "..."}.'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", remedy=form) from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not a JSON object", remedy=form)
    turns = entry.get("turns")
    text = entry.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where} has no prompt", remedy=form)
    for name, kinds in (("id", (str, int)), ("category", (str,))):
        if not isinstance(entry.get(name), kinds):
            raise UsageError(f"{where} has no {name}", remedy=form)
    return Prompt(str(entry["id"]), entry["category"], text)
