"""Says which parts an answer may have, and reads them while it is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_spec.text.parts.part import PartReader, PlainReader
from edge_spec.text.parts.thought_reader import NO_CALLS, PossibleCalls, ThoughtReader
from edge_spec.text.stop_cutter import overlap


@dataclass(frozen=True)
class ThoughtForm:
    """A thought stands between two tags. ending: all that the model's template writes between a
    thought and the text after it: the closing tag, space, and what else the text is opened with."""

    opening: str
    closing: str
    ending: str

    @property
    def lead(self) -> str:
        """Returns what opens the text after a thought, such as the name of a channel."""
        return self.ending.partition(self.closing)[2].strip()

    @property
    def without_lead(self) -> ThoughtForm:
        """Returns the same for an answer whose text is opened by what follows the thought."""
        before, closing, after = self.ending.partition(self.closing)
        space = after[: len(after) - len(after.lstrip())]
        return replace(self, ending=before + closing + space)

    def text_opening_after(self, prompt: str) -> str:
        """Returns what is left of `lead` after this prompt, which has asked for an answer."""
        shown = prompt.rstrip()
        return "" if self.is_passed_by(shown) else self.lead[overlap(shown, self.lead) :].strip()

    def is_opened_by(self, prompt: str) -> bool:
        """Says whether what follows the prompt is a thought."""
        return prompt.rstrip().endswith(self.opening)

    def is_passed_by(self, prompt: str) -> bool:
        """Says whether what follows the prompt is the text: it has closed a thought, or opened the
        text as after one."""
        shown, tags = prompt.rstrip(), re.split(r"(?=[<\[])", self.lead)
        return shown.endswith(self.closing) or shown.endswith("".join(tags[-2:]) or self.closing)

    def ending_after(self, text: str) -> str:
        """Returns what ends a thought that is the end of this text, some of which may be there."""
        if begun := overlap(text, self.closing):
            return self.ending[self.ending.index(self.closing) + begun :]
        ends_line = text.endswith("\n\n") or (text.endswith("\n") and not self.is_opened_by(text))
        return self.ending.lstrip("\n") if ends_line else self.ending


@dataclass(frozen=True)
class AnswerForm:
    """What may stand in an answer: at most one thought, at its beginning, and what follows it.

    thought: None where the model has none. is_opened: the prompt has opened it already. is_begun:
    the prompt has some of it, which the answer goes on with. is_closed: the prompt says that there
    is none, though the model may write one all the same. budget: tokens of the thought, after which
    it is ended; None: as many as the model wants. tells_thought: it is a part of its own, else of
    the text, as the model writes it. text_opening: what opens the text of an answer without a
    thought. following: makes the reader of what follows the thought, such as text and calls of
    tools. calls: those that it may have.
    """

    thought: ThoughtForm | None = None
    is_opened: bool = False
    is_begun: bool = False
    is_closed: bool = False
    budget: int | None = None
    tells_thought: bool = True
    text_opening: str = ""
    following: Callable[[], PartReader] = PlainReader
    calls: PossibleCalls = NO_CALLS

    def reader(self) -> PartReader:
        if self.thought is None or not self.tells_thought:
            return self.following()
        return ThoughtReader(
            self.thought.opening,
            self.thought.closing,
            self.following,
            is_opened=self.is_opened,
            is_begun=self.is_begun,
            openings=(self.text_opening, self.thought.lead),
            calls=self.calls,
        )
