"""The server of `edge-spec serve`: OpenAI's and other APIs over engines that share weights."""

from edge_spec.apps.server.running import RunningServer, run
from edge_spec.cli.options import ServerOptions

__all__ = ["RunningServer", "ServerOptions", "run"]
