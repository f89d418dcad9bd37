"""What a reply of any API is made of: a document, or the texts of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic_core import from_json

from edge_spec import GenerationResult
from edge_spec.apps.server.answer import Ended, Round
from edge_spec.apps.server.errors import ApiError


class Reply(ABC):
    """The form of one reply. Each method gives what is sent then, "" where there is nothing to
    tell; a stream has either `closing` or `failure` as its last."""

    media_type: ClassVar[str] = "text/event-stream"  # of a stream

    def opening(self) -> str:
        """Returns what a stream begins with."""
        return ""

    @abstractmethod
    def piece(self, round_: Round) -> str:
        """Returns what a round wrote."""

    @abstractmethod
    def end(self, ended: Ended) -> str:
        """Returns what is left to tell of a choice that is complete."""

    def closing(self) -> str:
        """Returns the end of a stream whose choices are all complete."""
        return ""

    @abstractmethod
    def failure(self, error: ApiError) -> str:
        """Returns the end of a stream that an error has ended, in the form of its API."""

    def waiting(self) -> str:
        """Returns what tells a client that waits for the next round that it is being written."""
        return ": still at work\n\n"  # clients pass over lines that begin with a colon

    def collect(self, round_: Round) -> None:  # noqa: B027 - most replies need only the results
        """Hears of each round of an answer that is not streamed, before `document` is asked."""

    @abstractmethod
    def document(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Returns the whole reply, for a client that does not stream."""


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, or what is complete of those of one that was cut."""
    try:
        given = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def server_event(data: str, name: str | None = None) -> str:
    """Returns a server-sent event. data: one line."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {data}\n\n"


_SEALED = "edge-spec."


def sealed(thought: str) -> str:
    """Returns a thought for a client that is not shown it. It is no secret: whoever asks has the
    answer anyway."""
    return _SEALED + b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str | None) -> str:
    """Returns the thought, "" of what was not sealed here."""
    if text is None or not text.startswith(_SEALED):
        return ""
    try:
        return b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""
