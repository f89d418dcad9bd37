"""Signatures of thoughts, which clients send back with them. Many drop a thought without one."""

from __future__ import annotations

from base64 import b64decode, b64encode
from hashlib import sha256

_CARRIES = "thought:"


def signature_of(thought: str, *, is_told: bool) -> str:
    """Returns the signature of a thought. Where it is not told, the signature carries it, so that
    a client that sends it back gives the model its thought back."""
    raw = thought.encode("utf-8", "replace")
    if is_told:
        return b64encode(sha256(raw).digest()).decode()
    return _CARRIES + b64encode(raw).decode()


def thought_of(signature: str) -> str:
    """Returns the thought that it carries, if it does."""
    if not signature.startswith(_CARRIES):
        return ""
    try:
        return b64decode(signature.removeprefix(_CARRIES), validate=True).decode()
    except ValueError:
        return ""
