"""The corpus: inputs of each target, named by their content."""

from __future__ import annotations

import hashlib
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def store(name: str, data: bytes) -> bool:
    """Whether the corpus did not have it."""
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.write_bytes(data)
    return is_new
