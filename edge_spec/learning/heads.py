"""Opens heads that were learnt here."""

from __future__ import annotations

from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import MedusaHead
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.errors import UnsupportedModelError
from edge_spec.loader.head import head_backend
from edge_spec.models import runtimes


def open_learnt_head(path: Path, target: ModelConfig, threads: int | None = None) -> MedusaNetwork:
    """Opens a head; what is made of its matrices is kept nowhere else: it is to be forgotten with
    the head. Raises an EdgeSpecError, ValueError, OSError for what is no head of this target."""
    head = runtimes.open_head(path, target)
    if not isinstance(head, MedusaHead):
        raise UnsupportedModelError(f"{path} is no head that was learnt here", remedy="Remove it.")
    return MedusaNetwork(head, head_backend(path, "", target.hidden_size, threads, keeps=False))
