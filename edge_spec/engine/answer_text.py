"""Turns decoded tokens into an answer's text and parts, handing out both in step."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edge_spec.core.text_codec import TextCodec
from edge_spec.engine.results import Alternative, Chunk, DecodedToken, GenerationResult, Token
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.parts.part import CallHead, Part, PartKind, PartReader, StopCutter
from edge_spec.text.token_pieces import TokenPiece, TokenPieces


class AnswerText:
    """Adds decoded tokens and their text to a result.

    Text once handed out stays. With stop strings, a token is held back while one may still take its
    text away. So token texts always join to the text, streamed or not, and neither depends on how
    many tokens a round had. Stop strings end the text only; thoughts and calls may contain them.
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
        """prompt: what the text continues; if that ends in text, the leading space that many
        tokenizers drop at the beginning of a text is kept."""
        self.num_written = 0  # tokens, including those of the stop string that ended the text
        self._result = result
        self._codec = codec
        self._tokens = TokenPieces(codec)
        self._stop_ids = stop_ids
        self._pieces = codec.stream()
        if prompt and self._tokens.of(prompt[-1]).raw is not None:
            for token in codec.encode("a")[-1:]:
                self._pieces.push(token)
        self._reader: PartReader | None = None
        if form is not None:
            from edge_spec.text.tools.formats import answer_reader

            self._reader = answer_reader(form)
        first = PartKind.REASONING if form is not None and form.is_opened else PartKind.TEXT
        self._parts = None if self._reader is None else PartTokens(self._reader, first)
        self._cutter = StopCutter(stops)
        self._holds = any(stops)
        self._shown = ""  # settled text that is not handed out yet
        self._held: deque[Token] = deque()
        self._finished = False
        self._begun = b""  # start of a character in the decoded tokens
        self._begun_before = b""  # likewise in the tokens handed out

    @property
    def stopped(self) -> bool:
        return self._cutter.stopped

    def push(self, decoded: Sequence[DecodedToken]) -> list[Chunk]:
        """Return what these tokens let out. Tokens after a stop string are not part of the
        answer."""
        chunks: list[Chunk] = []
        for token in decoded:
            # An end token shows no text, even if the tokenizer gives it some.
            ends = token.id in self._stop_ids
            made = self._token(token, "" if ends else self._pieces.push(token.id))
            self.num_written += 1
            if self._parts is None:
                self._add_text(made.text, [made])
            else:
                special = "" if ends else self._codec.special_text(token.id)
                for part in self._parts.push(made, special):
                    chunks += self._add_part(part)
            if self.stopped:
                break
        return [*chunks, *self._hand_out(self._settled())]

    def finish(self) -> list[Chunk]:
        """Return the rest once no more tokens come."""
        if self._finished:
            return []
        self._finished = True
        chunks: list[Chunk] = []
        if not self.stopped:
            left = self._pieces.finish()
            if self._parts is None:
                self._add_to_last(left)
                self._shown += self._cutter.push(left)
            else:
                for part in self._parts.finish(left):
                    chunks += self._add_part(part)
        if not self.stopped:
            self._shown += self._cutter.finish()
        self._result.stop = self._cutter.found
        self._result.is_cut = self._reader is not None and self._reader.is_cut
        last = self._before_cut() if self.stopped else list(self._held)
        return [*chunks, *self._hand_out(last)]

    def _add_part(self, part: Chunk) -> list[Chunk]:
        """Add a part; return what to hand out now, if it is not text."""
        if self.stopped:
            return []
        if part.kind is PartKind.TEXT:
            self._add_text(part.text, part.tokens)
            return []
        self._shown += self._cutter.finish()
        before = self._hand_out(list(self._held))
        self._result.add(part)
        return [*before, part]

    def _add_text(self, text: str, tokens: Sequence[Token]) -> None:
        """text: of the tokens or, without any, of a token already handed out."""
        if not tokens:
            self._shown += self._cutter.push(text)
        for token in tokens:
            special = self._codec.special_text(token.id) if self._holds else ""
            self._shown += self._cutter.push(token.text, special)
            self._held.append(token)

    def _settled(self) -> list[Token]:
        """Return the held tokens whose text is settled. A token without text, such as a part of a
        character, waits for one with text, since a stop string may begin with it."""
        if self.stopped:
            return self._before_cut()
        if not self._holds:
            return list(self._held)
        length, count = 0, 0
        for place, token in enumerate(self._held, start=1):
            length += len(token.text)
            if length > len(self._shown):
                break
            if token.text:
                count = place
        return list(self._held)[:count]

    def _before_cut(self) -> list[Token]:
        """Return the held tokens up to the stop string, with the last one shortened."""
        left, kept = len(self._shown), []
        for token in self._held:
            if left <= 0:
                break
            kept.append(replace(token, text=token.text[:left]))
            left -= len(token.text)
        kept = _within(self._shown, kept, self._begun_before)
        self._held.clear()
        self._held.extend(kept)
        return kept

    def _hand_out(self, tokens: list[Token]) -> list[Chunk]:
        for token in tokens:
            self._held.popleft()
            if token.raw:
                self._begun_before = _incomplete(self._begun_before + token.raw)
        # Only the rest of a character, after its token is out, has more text than the tokens.
        length = sum(len(token.text) for token in tokens) if self._held else len(self._shown)
        text, self._shown = self._shown[:length], self._shown[length:]
        if not text and not tokens:
            return []
        chunk = Chunk(text, tuple(tokens))
        self._result.add(chunk)
        return [chunk]

    def _add_to_last(self, left: str) -> None:
        """Give an incomplete last character to the last token that can have text."""
        if not left:
            return
        for tokens in (self._held, self._result.tokens):
            for place in reversed(range(len(tokens))):
                if tokens[place].id not in self._stop_ids:
                    tokens[place] = replace(tokens[place], text=tokens[place].text + left)
                    return

    def _token(self, token: DecodedToken, piece: str) -> Token:
        made = Token(token.id, piece, token.origin, token.drafter, ends=token.id in self._stop_ids)
        if token.score is None:
            return made
        own = self._own(token.id, piece, made.ends)
        logprob, alternatives = token.score
        listed = tuple(self._alternative(*alternative) for alternative in alternatives)
        return replace(made, logprob=logprob, alternatives=listed, name=own.name, raw=own.raw)

    def _own(self, token: int, piece: str, ends: bool) -> TokenPiece:
        """Return the token by itself, or as shown in the text, without a leading space."""
        own = self._tokens.of(token)
        if ends or own.raw is None:
            return TokenPiece(own.name, None)
        is_whole = not self._begun and _is_text(own.raw)
        self._begun = _incomplete(self._begun + own.raw)
        is_shown = is_whole and "\ufffd" not in piece  # it may be for bytes of earlier tokens
        return TokenPiece.of_bytes(piece.encode()) if is_shown else own

    def _alternative(self, token: int, logprob: float) -> Alternative:
        piece = self._tokens.of(token)
        return Alternative(token, piece.name, logprob, piece.raw)


def _within(text: str, tokens: Sequence[Token], before: bytes) -> list[Token]:
    """Cut tokens to the bytes of their text. A stop string may begin within a token, even with a
    part of a character. before: the part of a character already handed out."""
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
    """Return the incomplete character at the end."""
    _, length = codecs.utf_8_decode(raw, "replace", False)
    return raw[length:]


def _is_text(raw: bytes) -> bool:
    text, _ = codecs.utf_8_decode(raw, "ignore", True)
    return text.encode() == raw


@dataclass
class _Pending:
    """A token with characters not yet assigned to a part. token: None once handed out."""

    token: Token | None
    left: str  # unassigned rest of what it wrote
    is_special: bool  # no text shows it
    text: str = ""  # its text in a part
    kind: PartKind | None = None  # part of that text, or of the tag that it ends


class PartTokens:
    """Assigns tokens to the parts that they wrote.

    Token texts of a text or a thought join to it. A token without text, such as a tag's, belongs to
    the part that the reader names, else to the one before. A call's token has the text that it
    wrote.
    """

    def __init__(self, reader: PartReader, first: PartKind) -> None:
        """first: the part that an answer begins with unless the reader decides otherwise."""
        self._reader = reader
        self._kind = first
        self._pending: deque[_Pending] = deque()
        self._told: list[Chunk] = []

    def push(self, token: Token, special: str) -> list[Chunk]:
        """token: with all the text that it wrote. special: the spelling of a special token."""
        self._pending.append(_Pending(token, special or token.text, bool(special)))
        return self._chunks(self._reader.push(special or token.text))

    def finish(self, left: str) -> list[Chunk]:
        """left: the incomplete character at the end."""
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
        self._hand_out(len(self._pending) - 1)  # the last token may have text after the tag
        if self._pending and self._pending[-1].kind is None:
            self._pending[-1].kind = part.kind

    def _taken(self) -> list[Chunk]:
        told, self._told = self._told, []
        return told

    def _add_text(self, kind: PartKind, text: str) -> None:
        """Find the tokens that wrote this text; text before it belongs to no part."""
        written = "".join(each.left for each in self._pending)
        start = 0 if written.startswith(text) else written.rfind(text)
        if start < 0:  # changed by the reader: give all of it to the last token
            self._hand_out(len(self._pending) - 1)
            start, written = 0, text
            if not self._pending:
                self._pending.append(_Pending(None, "", is_special=False))
            self._pending[-1].left = text
        end = start + len(text)
        place = 0
        num_whole = 0  # fully assigned tokens
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
        """Add a piece, to the last chunk if it continues the same part."""
        last = self._told[-1] if self._told else None
        if last is None or last.kind is not kind or (call and (last.text or last.call)):
            self._told.append(last := Chunk("", (), kind, call))
        tokens = last.tokens if token is None else (*last.tokens, token)
        self._told[-1] = Chunk(last.text + text, tokens, kind, last.call or call)


def _has_text(token: Token | None) -> bool:
    return token is not None and not token.ends
