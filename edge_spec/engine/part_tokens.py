"""Gives the parts of an answer the tokens that wrote them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from edge_spec.engine.results import Chunk, Token
from edge_spec.text.parts.part import CallHead, Part, PartKind, PartReader


@dataclass
class _Pending:
    """A token, all of whose characters are not told yet. token: None once it was handed out."""

    token: Token | None
    left: str  # of what it wrote, until now
    is_special: bool  # no text shows it
    text: str = ""  # that it adds to a part
    kind: PartKind | None = None  # of that text, or else of the tag that it ends


class PartTokens:
    """Reads what tokens write, one after the other, and hands tokens out with the part that they
    belong to.

    Of a text or a thought, the texts of tokens join to it. A token that adds none, as those of tags
    do, belongs to the part that the reader says, else to the one before. A token of a call has the
    text that it wrote.
    """

    def __init__(self, reader: PartReader, first: PartKind) -> None:
        """first: the kind of what the answer begins with, unless the reader says otherwise."""
        self._reader = reader
        self._kind = first
        self._pending: deque[_Pending] = deque()
        self._told: list[Chunk] = []

    def push(self, token: Token, special: str) -> list[Chunk]:
        """token: with all the text that it wrote. special: how it is written where it is one."""
        self._pending.append(_Pending(token, special or token.text, bool(special)))
        return self._chunks(self._reader.push(special or token.text))

    def finish(self, left: str) -> list[Chunk]:
        """left: of an incomplete character at the end."""
        if left:
            last = next((each for each in reversed(self._pending) if _has_text(each.token)), None)
            if last is None:
                self._pending.append(last := _Pending(None, "", is_special=False))
            elif last.token is not None:
                last.token = replace(last.token, text=last.token.text + left)
            last.left += left
        chunks = self._chunks([*self._reader.push(left), *self._reader.finish()])
        self._hand_out(len(self._pending))
        return chunks + self._taken()

    def _chunks(self, parts: Iterable[Part]) -> list[Chunk]:
        for part in parts:
            if part.text and part.kind is not PartKind.CALL:
                self._add_text(part.kind, part.text)
            else:
                self._kind = part.kind
                self._end_tag(part)
        return self._taken()

    def _end_tag(self, part: Part) -> None:
        if part.kind is PartKind.CALL:
            self._hand_out(len(self._pending))
            self._tell(part.kind, part.text, call=part.call)
            return
        self._hand_out(len(self._pending) - 1)  # the last one may have text after the tag
        if self._pending and self._pending[-1].kind is None:
            self._pending[-1].kind = part.kind

    def _taken(self) -> list[Chunk]:
        told, self._told = self._told, []
        return told

    def _add_text(self, kind: PartKind, text: str) -> None:
        """Finds the tokens that wrote this text: what is before it in theirs is no one's."""
        written = "".join(each.left for each in self._pending)
        start = 0 if written.startswith(text) else written.rfind(text)
        if start < 0:  # the reader has changed it: all of it is the last token's
            self._hand_out(len(self._pending) - 1)
            start, written = 0, text
            if not self._pending:
                self._pending.append(_Pending(None, "", is_special=False))
            self._pending[-1].left = text
        end = start + len(text)
        place = 0
        num_whole = 0  # tokens that are told
        for count, each in enumerate(self._pending, start=1):
            if place >= end and each.left:
                break
            shown = each.left[max(0, start - place) : max(0, end - place)]
            place, each.left = place + len(each.left), each.left[max(0, end - place) :]
            if shown:
                self._give(each, kind, "" if each.is_special else shown)
            if not each.left:
                num_whole = count
        self._hand_out(num_whole)
        self._kind = kind

    def _give(self, pending: _Pending, kind: PartKind, text: str) -> None:
        if pending.text and pending.kind is not kind:
            self._hand_out_one(pending)
            pending.token, pending.text = None, ""
        pending.kind = kind
        pending.text += text

    def _hand_out(self, count: int) -> None:
        for _ in range(count):
            self._hand_out_one(self._pending.popleft())

    def _hand_out_one(self, pending: _Pending) -> None:
        kind = pending.kind or self._kind
        if pending.token is None and not pending.text:
            return
        token = pending.token
        if token is not None:
            text = token.text if kind is PartKind.CALL else pending.text
            token = replace(token, text=text, kind=kind)
        self._tell(kind, pending.text, token)

    def _tell(
        self, kind: PartKind, text: str, token: Token | None = None, call: CallHead | None = None
    ) -> None:
        """Tell a piece, in the last chunk if that goes on with the same part."""
        last = self._told[-1] if self._told else None
        if last is None or last.kind is not kind or (call and (last.text or last.call)):
            self._told.append(last := Chunk("", (), kind, call))
        tokens = last.tokens if token is None else (*last.tokens, token)
        self._told[-1] = Chunk(last.text + text, tokens, kind, last.call or call)


def _has_text(token: Token | None) -> bool:
    return token is not None and not token.ends
