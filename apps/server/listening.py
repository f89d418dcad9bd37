"""The sockets that a server listens on."""

from __future__ import annotations

import logging
import socket
import sys

from edge_spec.errors import DeviceError

_UNREAD_BYTES = 1 << 18  # that the system keeps for a client, before the server sees that it waits
_BOTH_FAMILIES = ("127.0.0.1", "localhost")  # which many clients reach by ::1, or try it first
_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> list[socket.socket]:
    """Connections are accepted by the system from here on, and wait; the first socket is of the
    host, and names the port. Raises DeviceError where it cannot be had.

    This machine is listened to by both of its own addresses, where it has them: clients ask for
    localhost, and some of them know ::1 alone, or wait seconds until they try the other one.
    """
    try:
        opened = [_listening(host, port)]
    except OSError as error:
        raise DeviceError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            remedy="Choose another --port, or 0 for a free one.",
        ) from error
    if host in _BOTH_FAMILIES:
        try:
            opened.append(_listening("::1", opened[0].getsockname()[1]))
        except OSError as error:
            _log.info("not listening on ::1, too: %s", error.strerror or error)
    return opened


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # where it lets another process take the port over
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        listening.bind((host, port))
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening
