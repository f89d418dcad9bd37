"""The web page in its own window, for `edge-spec desktop`."""

from edge_spec.apps.desktop.window import run

__all__ = ["run"]
