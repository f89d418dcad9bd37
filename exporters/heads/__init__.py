"""Readers of trained heads as their authors publish them."""

from edge_spec.exporters.heads.reader import is_head, open_head

__all__ = ["is_head", "open_head"]
