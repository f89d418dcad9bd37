"""Hands out the parts of an answer and the tokens that they are of, in step."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edge_spec.core.text_codec import TextCodec
from edge_spec.engine.results import Alternative, Chunk, DecodedToken, GenerationResult, Token
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.parts.part import (
    CallHead,
    Part,
    PartKind,
    StopCutter,
)
from edge_spec.text.token_pieces import TokenPiece, TokenPieces


@dataclass
class _Pending:
    """A token, all of whose characters are not read yet. token: None once it was handed out."""

    token: Token | None
    left: str  # of what it wrote, until now
    is_special: bool = False  # no text shows it
    text: str = ""  # that it adds to a part
    kind: PartKind | None = None  # of that text, or else of the tag that it ends


class AnswerText:
    """Adds tokens to a result as they are decoded, and their text.

    A reader says which part is what; the texts of tokens join to those of the parts. A token that
    adds no text, as those of tags do, belongs to the part that the reader says, else to the one
    before, and comes with the next that has some. A token of a call has the text that it wrote.

    What is handed out stays. Where there are stop strings, a token is held back while one of them
    may yet take its text away, and comes with its text: neither depends on how many tokens a round
    had. Stop strings end the text; a thought or a call may have them.
    """

    def __init__(
        self,
        result: GenerationResult,
        codec: TextCodec,
        prompt: Sequence[int],
        stops: Sequence[str],
        stop_ids: frozenset[int],
        form: AnswerForm | None = None,
    ) -> None:
        """prompt: what the text goes on with, where that ends in text: then the space that many
        tokenizers leave out at the beginning of a text is a part of it."""
        self.num_written = 0  # tokens, those of the stop string that ended the text included
        self._result = result
        self._codec = codec
        self._tokens = TokenPieces(codec)
        self._stop_ids = stop_ids
        self._pieces = codec.stream()
        if prompt and self._tokens.of(prompt[-1]).raw is not None:
            for token in codec.encode("a")[-1:]:
                self._pieces.push(token)
        self._reader = (form or AnswerForm()).reader()
        self._kind = PartKind.REASONING if form is not None and form.is_opened else PartKind.TEXT
        self._cutter = StopCutter(stops)
        self._has_stops = any(stops)
        self._reads_special = form is not None or self._has_stops
        self._pending: deque[_Pending] = deque()  # not read yet
        self._held: deque[tuple[str, Token | None]] = deque()  # texts that were read, by tokens
        self._shown = ""  # of these texts, what no stop string takes away
        self._told: list[Chunk] = []
        self._finished = False
        self._begun = b""  # of a character, in the tokens that were decoded
        self._begun_before = b""  # in those that were handed out

    @property
    def stopped(self) -> bool:
        """Says whether a stop string has ended the text."""
        return self._cutter.stopped

    def push(self, decoded: Sequence[DecodedToken]) -> list[Chunk]:
        """Returns what can be handed out with these tokens. Those after a stop string are none of
        the answer's."""
        for token in decoded:
            # An end shows no text, also where a tokenizer takes it for one.
            ends = token.id in self._stop_ids
            made = self._token(token, "" if ends else self._pieces.push(token.id))
            special = "" if ends else self._special(token.id)
            self.num_written += 1
            self._pending.append(_Pending(made, special or made.text, bool(special)))
            self._read(self._reader.push(special or made.text))
            if self.stopped:
                break
        self._hand_out(self._num_settled())
        return self._taken()

    def finish(self) -> list[Chunk]:
        """Returns what is left when no more tokens come."""
        if self._finished:
            return []
        self._finished = True
        if not self.stopped:
            left = self._pieces.finish()
            self._add_to_last(left)
            self._read([*self._reader.push(left), *self._reader.finish()])
            self._release(len(self._pending))
        if not self.stopped:
            self._shown += self._cutter.finish()
        self._result.stop = self._cutter.found
        self._result.is_cut = self._reader.is_cut
        self._hand_out(self._num_settled() if self.stopped else len(self._held))
        return self._taken()

    def _special(self, token: int) -> str:
        return self._codec.special_text(token) if self._reads_special else ""

    def _taken(self) -> list[Chunk]:
        told, self._told = self._told, []
        for chunk in told:
            self._result.add(chunk)
        return told

    def _add_to_last(self, left: str) -> None:
        """Gives an incomplete character at the end to the last token that can have text."""
        if not left:
            return
        last = next((each for each in reversed(self._pending) if _has_text(each.token)), None)
        if last is None:
            self._pending.append(last := _Pending(None, ""))
        elif last.token is not None:
            last.token = replace(last.token, text=last.token.text + left)
        last.left += left

    # What the reader says of the tokens that were written.

    def _read(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.text and part.kind is not PartKind.CALL:
                self._claim(part.kind, part.text)
                continue
            self._kind = part.kind
            if part.kind is PartKind.CALL:
                self._release(len(self._pending))
                if not self.stopped:
                    self._show_all()
                    self._tell(part.kind, part.text, call=part.call)
                continue
            self._release(len(self._pending) - 1)  # the last one may have text after the tag
            if self._pending and self._pending[-1].kind is None:
                self._pending[-1].kind = part.kind

    def _claim(self, kind: PartKind, text: str) -> None:
        """Finds the tokens that wrote this text: what is before it in theirs is no one's."""
        written = "".join(each.left for each in self._pending)
        start = 0 if written.startswith(text) else written.rfind(text)
        if start < 0:  # the reader has changed it: all of it is the last token's
            self._release(len(self._pending) - 1)
            start = 0
            if not self._pending:
                self._pending.append(_Pending(None, ""))
            self._pending[-1].left = text
        end = start + len(text)
        place = 0
        num_whole = 0  # tokens that are read
        for count, each in enumerate(self._pending, start=1):
            if place >= end and each.left:
                break
            shown = each.left[max(0, start - place) : max(0, end - place)]
            place, each.left = place + len(each.left), each.left[max(0, end - place) :]
            if shown:
                self._give(each, kind, "" if each.is_special else shown)
            if not each.left:
                num_whole = count
        self._release(num_whole)
        self._kind = kind

    def _give(self, pending: _Pending, kind: PartKind, text: str) -> None:
        if pending.text and pending.kind is not kind:
            self._release_one(pending)
            pending.token, pending.text = None, ""
        pending.kind = kind
        pending.text += text

    def _release(self, count: int) -> None:
        for _ in range(count):
            self._release_one(self._pending.popleft())

    def _release_one(self, pending: _Pending) -> None:
        """Has a token be handed out, once no stop string takes its text away."""
        kind, text, token = pending.kind or self._kind, pending.text, pending.token
        if self.stopped or (token is None and not text):
            return
        if token is not None:
            shown = token.text if kind is PartKind.CALL else text
            if (token.text, token.kind) != (shown, kind):
                token = replace(token, text=shown, kind=kind)
        if kind is PartKind.TEXT:
            special = self._special(token.id) if token is not None and self._has_stops else ""
            self._shown += self._cutter.push(text, special)
            self._held.append((text, token))
            return
        self._show_all()
        self._tell(kind, text, token)

    # What is shown of the text.

    def _show_all(self) -> None:
        self._shown += self._cutter.finish()
        self._hand_out(len(self._held))

    def _num_settled(self) -> int:
        """Returns how many texts are shown. A token without text, such as a part of a character,
        waits for the next that has some: a stop string may begin with it."""
        if self.stopped:
            self._cut()
        if self.stopped or not self._has_stops:
            return len(self._held)
        length, settled = 0, 0
        for count, (text, _) in enumerate(self._held, start=1):
            length += len(text)
            if length > len(self._shown):
                break
            if text:
                settled = count
        return settled

    def _cut(self) -> None:
        """Leaves out what is behind the place where a stop string has cut the text."""
        left, kept = len(self._shown), list[tuple[str, Token | None]]()
        for text, token in self._held:
            if left <= 0:
                break
            shown = text[:left]
            kept.append((shown, None if token is None else replace(token, text=shown)))
            left -= len(text)
        tokens = [token for _, token in kept if token is not None]
        within = iter(_within(self._shown, tokens, self._begun_before))
        self._held = deque((text, None if token is None else next(within)) for text, token in kept)

    def _hand_out(self, count: int) -> None:
        for _ in range(count):
            text, token = self._held.popleft()
            self._shown = self._shown[len(text) :]
            if token is not None and token.raw:
                self._begun_before = _incomplete(self._begun_before + token.raw)
            self._tell(PartKind.TEXT, text, token)

    def _tell(
        self, kind: PartKind, text: str, token: Token | None = None, call: CallHead | None = None
    ) -> None:
        """Tell a piece, in the last chunk if that goes on with the same part."""
        last = self._told[-1] if self._told else None
        if last is None or last.kind is not kind or (call and (last.text or last.call)):
            self._told.append(last := Chunk("", (), kind, call))
        tokens = last.tokens if token is None else (*last.tokens, token)
        self._told[-1] = Chunk(last.text + text, tokens, kind, last.call or call)

    # Tokens with what is asked for beside their text.

    def _token(self, token: DecodedToken, piece: str) -> Token:
        """piece: what it adds to the text."""
        made = Token(token.id, piece, token.origin, token.drafter, ends=token.id in self._stop_ids)
        if token.score is None:
            return made
        own = self._own(token.id, piece, made.ends)
        logprob, alternatives = token.score
        listed = tuple(self._alternative(*alternative) for alternative in alternatives)
        return replace(made, logprob=logprob, alternatives=listed, name=own.name, raw=own.raw)

    def _own(self, token: int, piece: str, ends: bool) -> TokenPiece:
        """The token by itself, or as it is in the text where that has it otherwise: without its
        space at the beginning."""
        own = self._tokens.of(token)
        if ends or own.raw is None:
            return TokenPiece(own.name, None)
        is_whole = not self._begun and _is_text(own.raw)
        self._begun = _incomplete(self._begun + own.raw)
        is_shown = is_whole and "\ufffd" not in piece  # which may be for bytes of tokens before it
        return TokenPiece.of_bytes(piece.encode()) if is_shown else own

    def _alternative(self, token: int, logprob: float) -> Alternative:
        piece = self._tokens.of(token)
        return Alternative(token, piece.name, logprob, piece.raw)


def _within(text: str, tokens: Sequence[Token], before: bytes) -> list[Token]:
    """Returns the tokens with no more bytes than this text of theirs has: a stop string may begin
    within a token, and with a part of a character. before: a part that was handed out."""
    joined = before + b"".join(token.raw or b"" for token in tokens)
    ends = range(len(before), len(joined) + 1)
    end = next((n for n in ends if joined[:n].decode("utf-8", "replace") == text), len(joined))
    left = end - len(before)
    kept = []
    for token in tokens:
        if token.raw is not None and left < len(token.raw):
            name, raw = TokenPiece.of_bytes(token.raw[:left])
            token = replace(token, name=name, raw=raw)
        left -= len(token.raw or b"")
        kept.append(token)
    return kept


def _incomplete(raw: bytes) -> bytes:
    """Returns the beginning of a character that is at the end."""
    _, length = codecs.utf_8_decode(raw, "replace", False)
    return raw[length:]


def _is_text(raw: bytes) -> bool:
    text, _ = codecs.utf_8_decode(raw, "ignore", True)
    return text.encode() == raw


def _has_text(token: Token | None) -> bool:
    return token is not None and not token.ends
