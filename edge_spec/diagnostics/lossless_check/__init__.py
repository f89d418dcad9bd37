"""`edge-spec verify`: check that speculation does not change what a model writes here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_spec.errors import UsageError
from edge_spec.models.asked_options import option

_MIN_DRAWS = 200


@dataclass(frozen=True)
class Extent:
    """How much is compared with plain decoding. Raises UsageError for too few draws."""

    prompts: Path | None = option(
        None,
        "JSON lines with id, category, and prompt or turns, or a .txt with a prompt a line; "
        "without it, ours.",
    )
    count: int = option(20, "Most prompts, from all over the file.", least=1)
    max_tokens: int = option(64, "Most tokens of an answer.", least=1)
    draws: int = option(1500, "Texts drawn for the distribution; 0 leaves sampling out.")

    def __post_init__(self) -> None:
        if self.draws and self.draws < _MIN_DRAWS:
            raise UsageError(
                f"{self.draws} draws show nothing",
                remedy=f"Give {_MIN_DRAWS} or more, or 0 to leave sampling out.",
            )
