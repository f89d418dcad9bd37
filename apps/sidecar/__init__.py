"""Another program's helper after `edge-spec serve --stdio`: JSON-RPC 2.0, a line a message."""

from edge_spec.apps.sidecar.sidecar import run

__all__ = ["run"]
