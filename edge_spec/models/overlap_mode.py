"""`--draft-overlap`: when drafts may go on while the target verifies."""

from __future__ import annotations

from enum import StrEnum

from edge_spec.errors import UsageError


class DraftOverlap(StrEnum):
    """Says when drafting for the next round goes on while the target verifies."""

    AUTO = "auto"  # where the draft has a device of its own, as long as that is faster
    ON = "on"
    OFF = "off"

    @classmethod
    def parse(cls, text: str) -> DraftOverlap:
        """Raises UsageError."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(
                f"drafts cannot overlap {text!r}", remedy=f"Choose: {', '.join(cls)}."
            ) from None
