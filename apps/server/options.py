"""The options of whoever starts a server, and the hosts and origins that they let ask."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_spec import SamplingParams
from edge_spec.apps import validation
from edge_spec.errors import UsageError
from edge_spec.text.parts.answer_form import TEXT_TOKENS, THOUGHT_TOKENS, Reasoning, thought_budget

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/?#@]+)(:[0-9]{0,5})?")  # a Host header
# The host may be * for extensions and views of editors, where it changes with each installation.
_ORIGIN = re.compile(
    r"(?!https?://\*)[a-z][a-z0-9+.-]*://(\*|[^/?#@*\s]*?)(?P<any_port>:\*)?", re.IGNORECASE
)
_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0)]


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


class ServerOptions(BaseModel):
    """parallel: answers of a model at once. queue: requests that may wait for a slot, for
    `queue_timeout_s`. load_timeout_s: that one may wait for its model to be opened. max_models:
    open at once; None: as many as fit. sampling, max_tokens, reasoning: of requests that do not
    say. thought_tokens: beside max_tokens, of a thought without a budget. asked_sampling: of the
    page, in place of the makers' sampling.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080  # 0: a free one
    api_key: Annotated[str, Field(pattern=r"^[ -~]+$")] | None = Field(None, repr=False)
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    parallel: _Count = 4
    queue: Annotated[int, Field(ge=0)] = 64
    queue_timeout_s: _Seconds = 60.0
    max_models: _Count | None = None
    load_timeout_s: _Seconds = 300.0
    request_timeout_s: _Seconds = 600.0  # of an answer, from its first token on
    client_timeout_s: _Seconds = 30.0  # that a client may take to send the body of a request
    grace_s: Annotated[float, Field(ge=0)] = 30.0  # that running answers have at the end
    max_body_bytes: _Count = 2 << 20
    max_tokens: _Count | None = TEXT_TOKENS  # None: to the end of the context
    thought_tokens: Annotated[int, Field(ge=0)] = THOUGHT_TOKENS
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    reasoning: Reasoning = "auto"
    asked_sampling: Mapping[str, float] = Field(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        """Raises UsageError."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            place, line = validation.told(error.errors(include_url=False), given)
            if place == ["api_key"]:  # which no message shows
                line = "the API key (--api-key) is empty or not ASCII"
            raise UsageError(line, remedy="See edge-spec serve --help.") from None
        thought_budget(self.reasoning)
        if not self.is_loopback and not self.api_key:
            raise UsageError(
                f"other machines reach {self.host}",
                remedy="Set --api-key or EDGE_SPEC_API_KEY, or listen on 127.0.0.1.",
            )
        for origin in self.cors_origins:
            origin_pattern(origin)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        return self.host == "localhost" or _is_loopback(self.host)

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


def _is_loopback(host: str) -> bool:
    return _is_ip(host) and ip_address(host).is_loopback
