"""Read trained draft heads in their authors' formats, and build a runtime's graph of them."""

from edge_spec.exporters.heads.reader import is_head, open_head, says_head
from edge_spec.exporters.heads.step_graph import step_graph

__all__ = ["is_head", "open_head", "says_head", "step_graph"]
