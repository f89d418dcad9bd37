"""What a form in which a model calls tools has to offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edge_spec.text.grammar import Grammar
from edge_spec.text.parts.part import PartReader
from edge_spec.text.plain_messages import Tools


class ToolForm(Protocol):
    """How calls of tools are spelled in an answer. Any thread may ask it: it changes nothing."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns the texts that a call may begin with; () where it has no beginning of its own."""

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of calls as messages have them."""

    def grammar(
        self, tools: Tools, *, required: bool, several: bool, text: Grammar | None = None
    ) -> Grammar:
        """Holds an answer to calls of `tools` from where the first one begins; nothing follows the
        last one.

        required: the answer begins with a call; else it is text, or text and then calls.
        several: up to MAX_CALLS. text: of a JSON schema, for an answer without a call. Raises
        UsageError for a schema that is none, or that no call fits.
        """

    def reader(self, tools: Tools = ()) -> PartReader:
        """Reads one answer: text and calls. tools: those that may be called, as far as they are
        known: values that the form writes without a type have the one of their schema."""
