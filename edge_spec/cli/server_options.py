"""The options of whoever starts a server, and the hosts and origins that they let ask."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any

from edge_spec.core.sampling_params import SamplingParams
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import declared_options, option, require_type
from edge_spec.text.parts.answer_form import TEXT_TOKENS, THOUGHT_TOKENS, Reasoning, thought_budget

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/?#@]+)(:[0-9]{0,5})?")  # a Host header
# The host may be * for extensions and views of editors, where it changes with each installation.
_ORIGIN = re.compile(
    r"(?!https?://\*)[a-z][a-z0-9+.-]*://(\*|[^/?#@*\s]*?)(?P<any_port>:\*)?", re.IGNORECASE
)
_KEY = re.compile(r"[ -~]+")
_LEAST_S = 1e-3
_UNDECLARED: Sequence[tuple[str, Any, float | None]] = (  # their types, and the least
    ("max_tokens", int | None, 1),
    ("thought_tokens", int, 0),
    ("sampling", SamplingParams, None),
    ("asked_sampling", Mapping, None),
)
_server = partial(option, panel="Server")
_several = partial(_server, (), read_as=list[str] | None)


def origin_pattern(origin: str) -> str:
    """Return the regular expression of an Origin header that is meant. Raises UsageError."""
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        raise UsageError(
            f"{origin!r} is no origin",
            remedy="Write it as https://example.com, http://localhost:*, app://obsidian.md or "
            "moz-extension://*.",
        )
    named = origin.removesuffix(":*") if found["any_port"] else origin
    pattern = re.escape(named).replace(r"\*", "[^/:?#]+")
    return f"(?i:{pattern}{'(:[0-9]+)?' if found['any_port'] else ''})"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Raises UsageError.

    max_tokens, sampling, reasoning: of requests that do not say. max_tokens None: to the end of
    the context. thought_tokens: beside max_tokens, of a thought without a budget. asked_sampling:
    of the page, in place of the makers' sampling.
    """

    host: str = _server("127.0.0.1", "The address; others than loopback need a key.")
    port: int = _server(8080, "The port; 0 takes a free one.", least=0, most=65535)
    api_key: str | None = _server(
        None, "What clients have to know.", envvar="EDGE_SPEC_API_KEY", repr=False
    )
    cors_origins: Sequence[str] = _several(
        "A site, app or extension whose pages may ask; may be repeated.", flag="--cors-origin"
    )
    allowed_hosts: Sequence[str] = _several(
        "Another name of this machine, by which a container or a tunnel asks; may be repeated.",
        flag="--allow-host",
    )
    max_models: int | None = _server(
        None, "Models open at once.  [default: as many as memory holds]", least=1
    )
    load_timeout_s: float = _server(
        300.0, "Seconds that a request may wait for its model to be opened.", least=_LEAST_S
    )
    parallel: int = _server(4, "Answers of a model at once, each with a cache of its own.", least=1)
    queue: int = _server(64, "Requests that may wait.", least=0)
    queue_timeout_s: float = _server(60.0, "Seconds that one may wait.", least=_LEAST_S)
    request_timeout_s: float = _server(
        600.0, "Seconds that an answer may take from its first token on.", least=_LEAST_S
    )
    client_timeout_s: float = _server(
        30.0, "Seconds that a client may take to send the body of a request.", least=_LEAST_S
    )
    grace_s: float = _server(30.0, "Seconds that answers have to end on a signal.", least=0)
    max_body_bytes: int = _server(2 << 20, "Largest request.", least=1)
    max_tokens: int | None = TEXT_TOKENS
    thought_tokens: int = THOUGHT_TOKENS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reasoning: Reasoning = "auto"
    asked_sampling: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise UsageError(  # which does not show it
                "the API key (--api-key) is empty or not ASCII", remedy="Set another one."
            )
        ranges: dict[str, tuple[float | None, float | None]] = {}
        for name, taken, least in _UNDECLARED:
            require_type(name, getattr(self, name), taken)
            ranges[name] = least, None
        for name, declared in declared_options(ServerOptions).items():
            require_type(name, getattr(self, name), declared.type, declared.help)
            ranges[name] = declared.least, declared.most
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is None:
                continue
            is_much = least is None or value >= least  # not so where it is no number
            if not is_much or (most is not None and value > most):
                to = "or more" if most is None else f"to {most}"
                raise UsageError(f"{name} is {value}", remedy=f"It has to be {least} {to}.")
        thought_budget(self.reasoning)
        if not self.is_loopback and not key:
            raise UsageError(
                f"other machines reach {self.host}",
                remedy="Set --api-key or EDGE_SPEC_API_KEY, or listen on 127.0.0.1.",
            )
        for origin in self.cors_origins:
            origin_pattern(origin)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        return self.host == "localhost" or (_is_ip(self.host) and ip_address(self.host).is_loopback)

    def allows_host(self, header: str) -> bool:
        """Return whether a request from this machine may call it so.

        A page of another site can have its own name lead here (DNS rebinding). Addresses belong to
        no name, and no name server answers for localhost.
        """
        found = _HOST.fullmatch(header.strip().lower())
        name = found[1].strip("[]").removesuffix(".") if found else ""
        allowed = {each.lower().removesuffix(".") for each in self.allowed_hosts}
        return name == "localhost" or name.endswith(".localhost") or name in allowed or _is_ip(name)


def _is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
