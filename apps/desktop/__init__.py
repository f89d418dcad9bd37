"""The web page in a window of its own, behind `edge-spec desktop`."""

from edge_spec.apps.desktop.window import run

__all__ = ["run"]
