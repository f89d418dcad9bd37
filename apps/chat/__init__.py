"""The terminal conversation of `edge-spec chat`."""

from edge_spec.apps.chat.repl import run

__all__ = ["run"]
