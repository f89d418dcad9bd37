"""GGUF files that have a trained head and no model, by what they call their architecture."""

from __future__ import annotations

from pathlib import Path

from edge_spec.errors import UsageError

EAGLE3, DFLASH, ASSISTANT = "eagle3", "dflash", "gemma4-assistant"
HEAD_ARCHITECTURES = (EAGLE3, DFLASH, ASSISTANT)


def no_model(path: Path) -> UsageError:
    return UsageError(
        f"{path} is a trained head, which is no model of its own",
        remedy="Name the model that it was trained for, and the head as its --draft.",
    )
