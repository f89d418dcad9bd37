"""The server after `edge-spec serve`: OpenAI's API over engines that share their weights."""

from edge_spec.apps.server.running import RunningServer, serve
from edge_spec.cli.server_options import ServerOptions

run = serve  # as the command line calls it

__all__ = ["RunningServer", "ServerOptions", "run", "serve"]
