"""The options of whoever starts a server, and the hosts and origins that they let ask."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import get_type_hints

from edge_spec import SamplingParams
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import require_type
from edge_spec.text.parts.answer_form import TEXT_TOKENS, THOUGHT_TOKENS, Reasoning, thought_budget

_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_HOST = re.compile(r"(?:\[(?P<address>[^]]*)\]|(?P<name>[^][:]*))(?::[0-9]{0,5})?")
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|\*|((?![/?#@*:\[\]])[!-~])*)"
    r"(?::(?P<port>[0-9]+|\*))?",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def origin_pattern(origin: str) -> str:
    """Return the regular expression of an Origin header that is meant. Raises UsageError.

    The host may be * for extensions and views of editors, where it changes with each installation,
    and the port may be *. Apps that load their pages from files say file://.
    """
    found = _ORIGIN.fullmatch(origin)
    scheme, host, port = found.group("scheme", "host", "port") if found else ("file", "*", None)
    scheme = scheme.lower()
    if bool(host) == (scheme == "file") or (host == "*" and scheme in _DEFAULT_PORTS):
        raise UsageError(
            f"{origin!r} is no origin",
            remedy="Write it as https://example.com, http://localhost:*, app://obsidian.md or "
            "moz-extension://*.",
        )
    named = "[^/:?#]+" if host == "*" else re.escape(host)
    if port == "*":
        ending = "(:[0-9]+)?"
    else:  # browsers leave the usual one out
        ending = "" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}"
    return f"(?i:{re.escape(scheme)}://{named}{ending})"


_RANGES: Sequence[tuple[str, Callable[[float], bool], str]] = (
    ("port", lambda value: 0 <= value <= 65535, "0 (a free one) to 65535"),
    ("parallel max_models max_body_bytes max_tokens", lambda value: value >= 1, "1 or more"),
    ("queue grace_s thought_tokens", lambda value: value >= 0, "0 or more"),
    (
        "queue_timeout_s load_timeout_s request_timeout_s client_timeout_s",
        lambda value: value > 0,
        "above 0",
    ),
)


@dataclass(frozen=True)
class ServerOptions:
    """Raises UsageError for an address that others reach without a key, and for values out of
    range.

    cors_origins: for `origin_pattern`. allowed_hosts: more names of this machine. parallel: answers
    of a model at once. queue: requests that may wait. max_models: open at once; None: as many as
    fit. sampling, max_tokens, reasoning: of requests that do not say. thought_tokens: beside
    max_tokens, of a thought without a budget. asked_sampling: of the page, in place of the makers'
    sampling.
    """

    host: str = "127.0.0.1"
    port: int = 8080  # 0: a free one
    api_key: str | None = field(default=None, repr=False)
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    parallel: int = 4
    queue: int = 64
    queue_timeout_s: float = 60.0
    max_models: int | None = None
    load_timeout_s: float = 300.0
    request_timeout_s: float = 600.0  # of an answer, from its first token on
    client_timeout_s: float = 30.0  # that a client may take to send a request, or not to read
    grace_s: float = 30.0  # that running answers have to end when the server is told to
    max_body_bytes: int = 2 << 20
    max_tokens: int | None = TEXT_TOKENS  # None: to the end of the context
    thought_tokens: int = THOUGHT_TOKENS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reasoning: Reasoning = "auto"
    asked_sampling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, taken in get_type_hints(ServerOptions).items():
            if name not in ("api_key", "reasoning"):  # no message shows a key
                require_type(name, getattr(self, name), taken)
        for names, is_valid, expected in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not is_valid(value):
                    raise UsageError(f"{name} is {value}", remedy=f"It has to be {expected}.")
        thought_budget(self.reasoning)
        if not self.is_loopback and not self.api_key:
            raise UsageError(
                f"other machines reach {self.host}",
                remedy="Set --api-key or EDGE_SPEC_API_KEY, or listen on 127.0.0.1.",
            )
        if self.api_key is not None and not (
            isinstance(self.api_key, str) and self.api_key and self.api_key.isascii()
        ):
            raise UsageError(
                "the API key is empty or not ASCII", remedy="Choose one that a header can carry."
            )
        for origin in self.cors_origins:
            origin_pattern(origin)
        hosts = tuple(host.lower().removesuffix(".") for host in self.allowed_hosts)
        for host in hosts:
            if not _NAME.fullmatch(host):
                raise UsageError(
                    f"{host!r} is no name of a host",
                    remedy="Write it without scheme, port and path, as host.docker.internal.",
                )
        object.__setattr__(self, "allowed_hosts", hosts)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def allows_host(self, header: str) -> bool:
        """Return whether a request from this machine may call it so.

        A page of another site can have its own name lead here (DNS rebinding). Addresses belong to
        no name, and no name server answers for localhost.
        """
        found = _HOST.fullmatch(header.strip().lower())
        if found is None:
            return False
        name = (found["address"] or found["name"] or "").removesuffix(".")
        try:
            ip_address(name)
            return True
        except ValueError:
            is_known = name == "localhost" or name.endswith(".localhost")
            return not found["address"] and (is_known or name in self.allowed_hosts)
