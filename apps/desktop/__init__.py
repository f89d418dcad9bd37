"""The web page in a window of its own, after `edge-spec desktop`."""

from edge_spec.apps.desktop.window import run

__all__ = ["run"]
