"""Thoughts that clients keep without reading them, and send back."""

from __future__ import annotations

from base64 import b64decode, b64encode

_SEALED = "edge-spec."


def sealed(thought: str) -> str:
    """Returns a thought for a client that is not shown it. It is no secret: whoever asks has the
    answer anyway."""
    return _SEALED + b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str | None) -> str:
    """Returns the thought, "" of what was not sealed here."""
    if text is None or not text.startswith(_SEALED):
        return ""
    try:
        return b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""
