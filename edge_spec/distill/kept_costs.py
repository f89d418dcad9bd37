"""Keeps what passes and draft tokens take here, measured once for a training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_spec.storage.atomic import atomic_file


@dataclass(frozen=True)
class Costs:
    """passes_s: of the target by rows, in seconds. draft_token_s: of a draft token."""

    passes_s: Mapping[int, float]
    draft_token_s: float


def kept_costs(path: Path, measure: Callable[[], Costs]) -> Costs:
    """Returns what the file holds; else what is measured now, and kept there. Raises OSError."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        told = json.loads(path.read_text(encoding="utf-8"))
        passes = {int(rows): float(seconds) for rows, seconds in told["passes_s"].items()}
        return Costs(passes, float(told["draft_token_s"]))
    found = measure()
    told = {"passes_s": dict(found.passes_s), "draft_token_s": found.draft_token_s}
    with atomic_file(path) as work:
        work.write_text(json.dumps(told), encoding="utf-8")
    return found
