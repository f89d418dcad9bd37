"""Says which parts an answer may have, and reads them while it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_spec.text.parts.part import Part, PartKind, PartReader
from edge_spec.text.parts.plain_reader import PlainReader
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
        ends = (place for place in reversed(range(len(self.lead) + 1)))
        begun = next(place for place in ends if prompt.rstrip().endswith(self.lead[:place]))
        return self.lead[begun:].strip()

    def is_opened_by(self, prompt: str) -> bool:
        """Says whether what follows the prompt is a thought."""
        return prompt.rstrip().endswith(self.opening)

    def ending_after(self, text: str) -> str:
        """Returns what ends a thought that is the end of this text, some of which may be there."""
        if begun := overlap(text, self.closing):
            return self.ending[self.ending.index(self.closing) + begun :]
        ends_line = text.endswith("\n\n") or (text.endswith("\n") and not self.is_opened_by(text))
        return self.ending.lstrip("\n") if ends_line else self.ending


@dataclass(frozen=True)
class AnswerForm:
    """What may stand in an answer: at most one thought, at its beginning, and what follows it.

    thought: None where the model has none. is_opened: the prompt has opened it already. is_closed:
    the prompt says that there is none, though the model may write one all the same. budget:
    tokens of the thought, after which it is ended; None: as many as the model wants. tells_thought:
    it is a part of its own, else of the text, as the model writes it. text_opening: what opens the
    text of an answer without a thought. following: makes the reader of what follows the thought,
    such as text and calls of tools.
    """

    thought: ThoughtForm | None = None
    is_opened: bool = False
    is_closed: bool = False
    budget: int | None = None
    tells_thought: bool = True
    text_opening: str = ""
    following: Callable[[], PartReader] = PlainReader

    def reader(self) -> PartReader:
        following = self.following()
        if self.thought is None or not self.tells_thought:
            return following
        return ThoughtReader(
            self.thought, following, is_opened=self.is_opened, text_opening=self.text_opening
        )


class ThoughtReader:
    """Reads a thought, if the answer begins with one, and then all else. What looks like a thought
    later on stays text. White space around the thought belongs to neither it nor the text."""

    def __init__(
        self, form: ThoughtForm, following: PartReader, *, is_opened: bool, text_opening: str
    ) -> None:
        self._form = form
        self._text_opening = text_opening
        self._following = following
        self._held = ""
        self._parts: list[Part] = []
        self._read = self._read_first_space if is_opened else self._read_opening

    @property
    def is_cut(self) -> bool:
        return self._following.is_cut

    def push(self, markup: str) -> list[Part]:
        self._held += markup
        while self._read():
            pass
        return self._told()

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._read == self._read_thought:
            self._tell(held)
        elif self._read in (self._read_opening, self._read_lead):
            self._parts += self._following.push(held)
        self._parts += self._following.finish()
        return self._told()

    def _told(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _tell(self, thought: str) -> None:
        if thought:
            self._parts.append(Part(PartKind.REASONING, thought))

    # What comes next. Each reads of `_held` what it can, and says whether another one goes on.

    def _read_opening(self) -> bool:
        text, opening = self._held.lstrip(), self._form.opening
        if text.startswith(opening):
            self._held = text[len(opening) :]
            self._parts.append(Part(PartKind.REASONING, ""))
            self._read = self._read_first_space
        elif any(text != each and each.startswith(text) for each in (opening, self._text_opening)):
            return False
        else:
            if self._text_opening:
                self._held = text.removeprefix(self._text_opening)
            self._read = self._read_rest
        return True

    def _read_first_space(self) -> bool:
        self._held = self._held.lstrip()
        self._read = self._read_thought if self._held else self._read_first_space
        return bool(self._held)

    def _read_thought(self) -> bool:
        thought, closing, after = self._held.partition(self._form.closing)
        if closing:
            self._tell(thought.rstrip())
            self._parts.append(Part(PartKind.REASONING, ""))
            self._held = after
            self._read = self._read_last_space
            return True
        sure = self._held[: len(self._held) - overlap(self._held, self._form.closing)].rstrip()
        self._tell(sure)
        self._held = self._held[len(sure) :]
        return False

    def _read_last_space(self) -> bool:
        self._held = self._held.lstrip()
        self._read = self._read_lead if self._held else self._read_last_space
        return bool(self._held)

    def _read_lead(self) -> bool:
        lead = self._form.lead
        if lead.startswith(self._held) and self._held != lead:
            return False
        self._held = self._held.removeprefix(lead)
        self._read = self._read_rest
        return True

    def _read_rest(self) -> bool:
        self._parts += self._following.push(self._held)
        self._held = ""
        return False
