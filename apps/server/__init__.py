"""The server after `edge-spec serve`: OpenAI's API over engines that share their weights."""

from edge_spec.apps.server.running import RunningServer, run
from edge_spec.cli.options import ServerOptions

__all__ = ["RunningServer", "ServerOptions", "run"]
