"""Turn decoded tokens into an answer's text and parts, handing out both in step."""

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


@dataclass
class _Piece:
    """A token with the text that it adds to a part, or such text whose token is handed out."""

    token: Token | None
    start: int = 0  # of what it wrote, in all that the reader gets
    end: int = 0
    is_special: bool = False  # no text shows it
    text: str = ""
    kind: PartKind | None = None  # part of that text, or of the tag that it ends

    @property
    def takes_text(self) -> bool:
        return self.token is not None and not self.token.ends

    @property
    def raw(self) -> bytes:
        """The token's bytes, unless they are text that no part shows, as a tag's."""
        raw = self.token.raw or b"" if self.token else b""
        return raw if self.text or not _is_text(raw) else b""


class AnswerText:
    """Adds decoded tokens, and the text and parts that they wrote, to a result.

    Text once handed out stays. A token waits until the reader knows its part, and with stop strings
    while one may still take its text away. So token texts always join to the text, streamed or not,
    and neither depends on how many tokens a round had. Stop strings end the text only; thoughts and
    calls may contain them.

    A token without text, such as a tag's, belongs to the part that the reader names, else to the
    one before. A call's token has the text that it wrote.
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
        self._decoder = codec.stream()
        if prompt and self._tokens.of(prompt[-1]).raw is not None:
            for token in codec.encode("a")[-1:]:
                self._decoder.push(token)
        self._reader: PartReader | None = None
        if form is not None:
            from edge_spec.text.tools.formats import answer_reader

            self._reader = answer_reader(form)
        self._kind = PartKind.REASONING if form is not None and form.is_opened else PartKind.TEXT
        self._end = 0  # of all that the reader got
        self._unread: deque[_Piece] = deque()  # part unknown
        self._cutter = StopCutter(stops)
        self._holds = any(stops)
        self._held: deque[_Piece] = deque()  # of the text
        self._num_shown = 0  # characters of `_held` that no stop string can take away
        self._chunks: list[Chunk] = []  # to hand out
        self._finished = False
        self._begun = b""  # start of a character in the decoded tokens
        self._begun_before = b""  # likewise in the tokens handed out

    @property
    def stopped(self) -> bool:
        return self._cutter.stopped

    def push(self, decoded: Sequence[DecodedToken]) -> list[Chunk]:
        """Return what these tokens let out. Tokens after a stop string are not part of the
        answer."""
        for token in decoded:
            # An end token shows no text, even if the tokenizer gives it some.
            ends = token.id in self._stop_ids
            made = self._token(token, "" if ends else self._decoder.push(token.id))
            self.num_written += 1
            if self._reader is None:
                self._hold(made, made.text)
            else:
                special = "" if ends else self._codec.special_text(token.id)
                self._write(special or made.text, made, is_special=bool(special))
                self._read(self._reader.push(special or made.text))
            if self.stopped:
                break
        self._hand_out(self._num_settled())
        return self._take_chunks()

    def finish(self) -> list[Chunk]:
        """Return the rest once no more tokens come."""
        if self._finished:
            return []
        self._finished = True
        left = "" if self.stopped else self._decoder.finish()
        if self._reader is None:
            self._hold_rest(left)
        elif not self.stopped:
            self._write_rest(left)
            self._read([*self._reader.push(left), *self._reader.finish()])
            self._assign_until(self._end)
        self._result.is_cut = self._reader is not None and self._reader.is_cut
        self._result.stop = self._cutter.found
        self._num_shown += len(self._cutter.finish())
        self._hand_out(len(self._held) if not self.stopped else self._num_settled())
        return self._take_chunks()

    # Which token wrote what

    def _write(self, markup: str, token: Token | None, *, is_special: bool = False) -> None:
        start, self._end = self._end, self._end + len(markup)
        self._unread.append(_Piece(token, start, self._end, is_special))

    def _write_rest(self, left: str) -> None:
        """Give an incomplete last character to the last token that can have text."""
        ends: list[_Piece] = []
        while self._unread and not self._unread[-1].takes_text:
            ends.append(self._unread.pop())
        if self._unread and (token := self._unread[-1].token) is not None:
            self._unread[-1].token = replace(token, text=token.text + left)
            self._end += len(left)
            self._unread[-1].end = self._end
        else:
            self._write(left, None)
        for piece in reversed(ends):
            self._write("", piece.token)

    def _read(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.kind is PartKind.CALL:
                self._kind = part.kind
                self._assign_until(self._end)
                self._show_all()
                self._tell(part.kind, part.text, call=part.call)
            elif part.text:
                self._read_text(part)
            else:
                self._kind = part.kind
                self._assign_until(part.end)
                if self._unread and self._unread[0].start < part.end:  # with text after the tag
                    self._unread[0].kind = self._unread[0].kind or part.kind

    def _read_text(self, part: Part) -> None:
        start = part.end - len(part.text)
        begun = min(self._unread[0].start, part.end) if self._unread else part.end
        if begun > start:  # its token is handed out with another part
            text = part.text[: begun - start]
            self._assign(_Piece(None, start, begun, text=text, kind=part.kind))
        for piece in self._unread:
            shown = part.text[max(0, piece.start - start) : max(0, piece.end - start)]
            if not shown:
                continue
            if piece.text and piece.kind is not part.kind:
                self._assign(replace(piece))
                piece.token, piece.text = None, ""
            piece.kind = part.kind
            piece.text += "" if piece.is_special else shown
        self._assign_until(part.end)
        self._kind = part.kind

    def _assign_until(self, end: int) -> None:
        while self._unread and self._unread[0].end <= end:
            self._assign(self._unread.popleft())

    def _assign(self, piece: _Piece) -> None:
        kind = piece.kind or self._kind
        if self.stopped or not (piece.token or piece.text):
            return
        if kind is PartKind.TEXT:
            self._hold(piece.token, piece.text)
        else:
            self._show_all()
            self._tell(kind, piece.text, piece.token)

    # Which text a stop string may take away

    def _hold(self, token: Token | None, text: str) -> None:
        special = self._codec.special_text(token.id) if token is not None and self._holds else ""
        self._num_shown += len(self._cutter.push(text, special))
        self._held.append(_Piece(token, text=text))

    def _hold_rest(self, left: str) -> None:
        """Give an incomplete last character to the last token that can have text, even if that is
        handed out."""
        if not left:
            return
        self._num_shown += len(self._cutter.push(left))
        if last := next((each for each in reversed(self._held) if each.takes_text), None):
            last.text += left
            return
        self._held.append(_Piece(None, text=left))
        tokens = self._result.tokens
        for place in reversed(range(len(tokens))):
            if not tokens[place].ends:
                tokens[place] = replace(tokens[place], text=tokens[place].text + left)
                return

    def _show_all(self) -> None:
        """Hand out the text before another part."""
        if not self.stopped:
            self._num_shown += len(self._cutter.finish())
            self._hand_out(len(self._held))

    def _num_settled(self) -> int:
        """Return how many held tokens have settled text. A token without text, such as a part of a
        character, waits for one with text, since a stop string may begin with it."""
        if self.stopped:
            self._cut()
        if self.stopped or not self._holds:
            return len(self._held)
        length, count = 0, 0
        for place, piece in enumerate(self._held, start=1):
            length += len(piece.text)
            if length > self._num_shown:
                break
            if piece.text:
                count = place
        return count

    def _cut(self) -> None:
        """Drop what follows the text before the stop string, in the last token, too."""
        text = "".join(piece.text for piece in self._held)[: self._num_shown]
        left, kept = len(text), deque[_Piece]()
        while left > 0:
            kept.append(piece := self._held.popleft())
            piece.text = piece.text[:left]
            left -= len(piece.text)
        self._held = kept
        # A stop string may begin within a token, even with a part of a character.
        before = self._begun_before
        raw = [piece.raw for piece in kept]
        joined = before + b"".join(raw)
        ends = range(len(joined), len(before) - 1, -1)
        end = next((n for n in ends if joined[:n].decode("utf-8", "replace") == text), len(joined))
        left = end - len(before)
        for piece, own in zip(kept, raw, strict=True):
            if own and left < len(own):
                name, cut = TokenPiece.of_bytes(own[:left])
                piece.token = piece.token and replace(piece.token, name=name, raw=cut)
            left -= len(own)

    def _hand_out(self, count: int) -> None:
        for _ in range(count):
            piece = self._held.popleft()
            self._num_shown -= len(piece.text)
            if piece.token is not None and piece.token.raw:
                self._begun_before = _incomplete(self._begun_before + piece.token.raw)
            self._tell(PartKind.TEXT, piece.text, piece.token)

    def _tell(
        self, kind: PartKind, text: str, token: Token | None = None, call: CallHead | None = None
    ) -> None:
        """Add a piece, to the last chunk if it continues the same part."""
        if token is not None:
            own = token.text if kind is PartKind.CALL else text
            token = replace(token, text=own, kind=kind)
        last = self._chunks[-1] if self._chunks else None
        if last is None or last.kind is not kind or (call and (last.text or last.call)):
            self._chunks.append(last := Chunk("", (), kind, call))
        tokens = last.tokens if token is None else (*last.tokens, token)
        self._chunks[-1] = Chunk(last.text + text, tokens, kind, last.call or call)

    def _take_chunks(self) -> list[Chunk]:
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            self._result.add(chunk)
        return chunks

    # Tokens by themselves

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


def _incomplete(raw: bytes) -> bytes:
    """Return the incomplete character at the end."""
    _, length = codecs.utf_8_decode(raw, "replace", False)
    return raw[length:]


def _is_text(raw: bytes) -> bool:
    text, _ = codecs.utf_8_decode(raw, "ignore", True)
    return text.encode() == raw
