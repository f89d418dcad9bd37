"""The options of whoever starts a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, get_type_hints

from edge_spec import SamplingParams
from edge_spec.apps.server.addresses import host_name, origin_pattern
from edge_spec.errors import UsageError
from edge_spec.models.option_values import require_type
from edge_spec.text.parts.answer_form import TEXT_TOKENS, THOUGHT_TOKENS
from edge_spec.text.thoughts import Reasoning, thought_budget

NO_PLAN: Mapping[str, Any] = {"candidates": []}


@dataclass(frozen=True)
class ServerOptions:
    """Raises UsageError for an address that others reach without a key, and for values out of
    their range.

    cors_origins: sites whose pages may ask, as `addresses.origin_pattern` reads them.
    allowed_hosts: further names of this machine, by which its own containers and tunnels ask.
    parallel: answers of a model at once, each with a cache of its own. queue: requests that may
    wait for one. max_models: that are open at the same time; None: as many as memory holds.
    load_timeout_s: that a request may wait for its model to be opened.
    sampling, max_tokens, reasoning: of requests that do not say. thought_tokens: beside max_tokens,
    those of a thought that has no budget; 0: a thought has no room of its own. asked_sampling: by
    the names of SamplingParams, what goes before how the model's makers mean its answers to be
    drawn, which is how the page has them drawn. plan: as `edge-spec plan --json` prints it.
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
    plan: Mapping[str, Any] = field(default_factory=lambda: NO_PLAN)

    def __post_init__(self) -> None:
        for name, taken in get_type_hints(ServerOptions).items():
            if name not in ("api_key", "reasoning"):  # no message shows a key
                require_type(name, getattr(self, name), taken)
        for name, valid, expected in (
            ("port", 0 <= self.port <= 65535, "0 (a free one) to 65535"),
            ("parallel", self.parallel >= 1, "1 or more"),
            ("queue", self.queue >= 0, "0 (nobody waits) or more"),
            ("queue_timeout_s", self.queue_timeout_s > 0, "above 0"),
            ("max_models", self.max_models is None or self.max_models >= 1, "1 or more"),
            ("load_timeout_s", self.load_timeout_s > 0, "above 0"),
            ("request_timeout_s", self.request_timeout_s > 0, "above 0"),
            ("client_timeout_s", self.client_timeout_s > 0, "above 0"),
            ("grace_s", self.grace_s >= 0, "0 or more"),
            ("max_body_bytes", self.max_body_bytes >= 1, "1 or more"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("thought_tokens", self.thought_tokens >= 0, "0 or more"),
        ):
            if not valid:
                raise UsageError(
                    f"{name} is {getattr(self, name)}", remedy=f"It has to be {expected}."
                )
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
        names = tuple(host_name(name) for name in self.allowed_hosts)
        object.__setattr__(self, "allowed_hosts", names)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
