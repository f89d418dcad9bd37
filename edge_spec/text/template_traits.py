"""What a chat template makes of messages and tools, found out by rendering small ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from edge_spec.errors import EdgeSpecError
from edge_spec.text.plain_messages import Message
from edge_spec.text.template_probes import probe_message, probe_of, shape_of, words_of

if TYPE_CHECKING:
    from edge_spec.text.tools.detection import NativeTools, Render

_MAX_SHAPES = 1000  # of conversations, which are remembered


class TemplateTraits:
    """Each is found out when it is asked for first. Any thread may ask."""

    def __init__(self, render: Render, tokens: Callable[[], Collection[str]] = tuple) -> None:
        """render: raises EdgeSpecError for what the template refuses. tokens: the added ones of the
        model."""
        self._render = render
        self._tokens = tokens
        self._taken: dict[Hashable, bool] = {}  # by the shape of a conversation

    @cached_property
    def takes_system(self) -> bool:
        """Says whether a first message of the system is shown."""
        return self.takes([probe_message("system", ""), probe_message("user", "")])

    def takes(self, messages: Sequence[Message]) -> bool:
        """Says whether all of a conversation of this shape is shown, wherever its speakers and
        calls stand."""
        shape = tuple(map(shape_of, messages))
        taken = self._taken.get(shape)
        if taken is None:
            if len(self._taken) >= _MAX_SHAPES:
                self._taken.clear()
            taken = self._taken[shape] = self._shows(
                [probe_of(message, place) for place, message in enumerate(messages)]
            )
        return taken

    @cached_property
    def native_tools(self) -> NativeTools | None:
        """Returns None if it shows no calls and tells of no form of ours."""
        from edge_spec.text.tools.detection import native_tools

        return native_tools(self._render, self._tokens)

    def _shows(self, probes: Sequence[Message]) -> bool:
        try:
            text = self._render(probes, ())
        except EdgeSpecError:
            return False
        return all(word in text for probe in probes for word in words_of(probe))
