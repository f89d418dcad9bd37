"""Tells which names of this server, which pages and which paths a request may have."""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address

from edge_spec.errors import UsageError

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_HOST = re.compile(r"(?:\[(?P<address>[^]]*)\]|(?P<name>[^][:]*))(?::[0-9]{0,5})?")
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|\*|[!-~]*?)(?::(?P<port>[0-9]+|\*))?",
    re.IGNORECASE,
)
_NO_HOST = re.compile(r"[/?#@*:\[\]]")  # what no name of a host has
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_ROOMS = ("chat", "completions", "messages", "models", "responses")  # what follows /v1/


def host_name(name: str) -> str:
    """Returns a name as `is_allowed_host` compares it. Raises UsageError for what is none."""
    plain = name.lower().removesuffix(".")
    if not _NAME.fullmatch(plain):
        raise UsageError(
            f"{name!r} is no name of a host",
            remedy="Write it without scheme, port and path, as host.docker.internal.",
        )
    return plain


def is_allowed_host(header: str, allowed: Collection[str]) -> bool:
    """Tells whether a request that only this machine can send may call it so.

    A page of another site can have its own name lead here (DNS rebinding), and its requests carry
    that name. An address in figures belongs to no name, and no name server answers for localhost
    and what ends with .localhost.
    """
    found = _HOST.fullmatch(header.strip().lower())
    if found is None:
        return False
    name = (found["address"] or found["name"] or "").removesuffix(".")
    try:
        ip_address(name)
        return True
    except ValueError:
        return not found["address"] and (
            name == "localhost" or name.endswith(".localhost") or name in allowed
        )


def origin_pattern(origin: str) -> str:
    """Returns the regular expression of an Origin header that is meant. Raises UsageError.

    The host may be * where it changes with each installation, which it does for extensions and the
    views of editors: no page of the web has such a scheme. The port may be *, too.
    """
    if origin.strip().lower() == "null":
        raise UsageError(
            "null is the origin of sandboxed pages, which any site can make",
            remedy="Serve the page over HTTP, and name that address: http://localhost:8000.",
        )
    found = _ORIGIN.fullmatch(origin)
    if found is None or not _is_origin(found["scheme"].lower(), found["host"]):
        raise UsageError(
            f"{origin!r} is no origin",
            remedy="Write it as https://example.com, http://localhost:*, app://obsidian.md or "
            "moz-extension://*.",
        )
    scheme, host, port = found["scheme"].lower(), found["host"], found["port"]
    named = "[^/:?#]+" if host == "*" else re.escape(host)
    if port == "*":
        ending = "(:[0-9]+)?"
    else:  # browsers leave the usual one out
        ending = "" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}"
    return f"(?i:{re.escape(scheme)}://{named}{ending})"


def _is_origin(scheme: str, host: str) -> bool:
    if host == "*":
        return scheme not in _DEFAULT_PORTS
    if host.startswith("["):
        return True
    # Apps that load their pages from files say file:// and nothing more; browsers say null.
    return not _NO_HOST.search(host) and bool(host) == (scheme != "file")


def plain_path(path: str) -> str:
    """Return the path that a client means that joined it to the wrong address: with a slash too
    many, /v1 twice, or without it."""
    parts = [part for part in path.split("/") if part]
    while parts[:2] == ["v1", "v1"]:
        del parts[0]
    if parts and parts[0] in _ROOMS:
        parts.insert(0, "v1")
    return "/" + "/".join(parts)
