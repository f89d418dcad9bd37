"""The server after `edge-spec serve`: OpenAI's API over engines that share their weights."""

from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.running import RunningServer, run, serve

__all__ = ["RunningServer", "ServerOptions", "run", "serve"]
