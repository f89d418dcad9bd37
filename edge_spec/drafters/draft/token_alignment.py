"""One text in the tokens of two tokenizers, kept in step as it grows.

Only the end of the text is encoded again when it grows: everything before the last place where
both tokenizations have a boundary, and from which both encode the rest as before, is settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from edge_spec.core.text_codec import TextCodec, TextPieces

MAX_OPEN = 48  # characters at the end of a text that may be encoded again each round
_KEPT_OPEN = 16  # of them that stay open: what follows can still change how they are encoded
_FORCED = 4 * MAX_OPEN  # from here on any boundary will do
_MAX_TRIES = 3


class PartCodec:
    """A tokenizer that is asked for parts of a text, where it knows only whole ones.

    Tokenizers that put a space before every text would put it before a part as well: `middle` is
    what such parts are encoded after.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.begin = codec.encode("")  # BOS, where the model wants one
        self._heads = {"": self.begin}
        self._markers: dict[int, bool] = {}
        letter = self.after("", "a")
        self._anchor = letter[-1:]
        self.middle = "" if codec.encode("\na")[-len(letter) :] == letter else "\n"

    def after(self, head: str, part: str) -> list[int]:
        """Encodes `part` as after `head`, where nothing joins the two; otherwise alone."""
        known = self._heads.get(head)
        if known is None:
            known = self._heads[head] = self._codec.encode(head)
        ids = self._codec.encode(head + part)
        if head and ids[: len(known)] != known:
            return self.after("", part)
        return ids[len(known) :]

    def stream(self, inside: bool = True) -> TextPieces:
        """Opens a stream of a text's beginning, or `inside` a text, where no leading space is left
        out."""
        stream = self._codec.stream()
        for token in self._anchor if inside else ():
            stream.push(token)
        return stream

    def pieces(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text that each token completes; before: of a character that they may complete."""
        stream = self.stream()
        for token in before:
            stream.push(token)
        return [stream.push(token) for token in tokens]

    def is_marker(self, token: int) -> bool:
        """Says whether the token has no text at all, as special tokens have none."""
        known = self._markers.get(token)
        if known is None:
            stream = self.stream()
            known = self._markers[token] = not (stream.push(token) or stream.finish())
        return known

    def spelling(self, token: int) -> str:
        return self._codec.token_text(token)

    def marker(self, spelling: str) -> int | None:
        """The special token that is spelt like this."""
        ids = self.after("", spelling) or self.begin[:1]
        same = len(ids) == 1 and self.spelling(ids[0]) == spelling and self.is_marker(ids[0])
        return ids[0] if same else None


class _Boundary(NamedTuple):
    """A place that both tokenizations have; what follows is encoded after these heads."""

    num_tokens: int
    num_ids: int
    target_head: str
    draft_head: str


class TokenAlignment:
    """A text that the target writes in tokens and the draft reads in ids of its own.

    `ids` are the draft's that are settled, `open_ids` those that follow for now; both are brought
    up to date by `read`. Special tokens of the target become those of the draft that are spelt
    alike; the others are left out. A character that is not complete yet has no ids.
    """

    def __init__(self, target: PartCodec, draft: PartCodec) -> None:
        self._target = target
        self._draft = draft
        self.tokens: list[int] = []
        self._pieces: list[str] = []  # of the tokens that were read
        self._stream = target.stream(inside=False)
        self._boundaries = [_Boundary(0, len(draft.begin), "", "")]
        self.ids = list(draft.begin)
        self.open_ids: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Another text; what it shares with the one before is not encoded again."""
        shared = num_shared(tokens, self.tokens[: len(self._pieces)])
        while self._boundaries[-1].num_tokens > shared:
            self._boundaries.pop()
        last = self._boundaries[-1]
        del self._pieces[last.num_tokens :]
        del self.ids[last.num_ids :]
        self.open_ids = []
        self.tokens = list(tokens)  # only now: an interrupt may have come before
        self._stream = self._target.stream(inside=last.num_tokens > 0)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def read(self) -> None:
        for token in self.tokens[len(self._pieces) :]:
            piece = self._stream.push(token)
            if not piece and self._target.is_marker(token):
                self._mark(token)
            else:
                self._pieces.append(piece)
        text = self._encode_end()
        if len(text) > MAX_OPEN:
            self._settle(text)

    def translate(self, candidate: str) -> list[int]:
        """The tokens that the target's tokenizer makes of `candidate` after the text.

        As much of the open end as is encoded to the tokens that it has is encoded with it; of a
        text that was written in other tokens that may be nothing. Empty where the text ends with
        a part of a character and `candidate` does not begin with that character.
        """
        start, head = self._boundaries[-1].num_tokens, self._boundaries[-1].target_head
        end = len(self.tokens)
        for _ in range(_MAX_TRIES):
            tail = self.tokens[start:]
            tokens = self._target.after(head, "".join(self._pieces[start:]) + candidate)
            if tokens[: len(tail)] == tail:
                return tokens[len(tail) :]
            start, head = start + num_shared(tokens, tail) + 1, self._target.middle
            while start < end and not self._pieces[start - 1]:
                start += 1
            if start == end:
                break
        return [] if self._unfinished() else self._target.after(self._target.middle, candidate)

    def target_pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of these tokens completes after the text."""
        return self._target.pieces(tokens, self._unfinished())

    def _unfinished(self) -> list[int]:
        """The tokens at the end that are a part of a character."""
        start, end = self._boundaries[-1].num_tokens, len(self.tokens)
        while end > start and not self._pieces[end - 1]:
            end -= 1
        return self.tokens[end:]

    def _encode_end(self) -> str:
        """Sets `open_ids`; the text that they are of."""
        last = self._boundaries[-1]
        text = "".join(self._pieces[last.num_tokens :])
        self.open_ids = self._draft.after(last.draft_head, text) if text else []
        return text

    def _mark(self, token: int) -> None:
        """A special token ends what is open in both tokenizations."""
        open_text = self._encode_end()
        self.ids += self.open_ids
        spelling = self._target.spelling(token)
        marker = self._draft.marker(spelling) if spelling else None
        if marker is not None:
            draft_head = spelling
            if self.ids != [marker]:  # BOS may be there
                self.ids.append(marker)
        else:
            draft_head = self._draft.middle if open_text else self._boundaries[-1].draft_head
        self._pieces.append("")
        self._boundaries.append(_Boundary(len(self._pieces), len(self.ids), spelling, draft_head))
        self._stream = self._target.stream()

    def _settle(self, text: str) -> None:
        """Moves the boundary towards the end of `text`, which is what is open."""
        places = list(self._places(text))
        chosen = next(
            (place for place in places[:_MAX_TRIES] if self._is_stable(text, *place)), None
        )
        if chosen is None:
            if len(text) <= _FORCED:
                return
            whole = (len(text), len(self.tokens) - len(self._unfinished()), len(self.open_ids))
            chosen = places[0] if places else whole
        _, num_tokens, num_ids = chosen
        self.ids += self.open_ids[:num_ids]
        del self.open_ids[:num_ids]
        self._boundaries.append(
            _Boundary(num_tokens, len(self.ids), self._target.middle, self._draft.middle)
        )

    def _places(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Boundaries of both tokenizations: characters of `text`, tokens, and open ids before
        them; the last come first."""
        start = max(self._boundaries[-1].num_tokens, len(self._pieces) - 2 * MAX_OPEN)
        of_target = _ends(self._pieces[start:], len(text))
        first_id = max(0, len(self.open_ids) - 2 * MAX_OPEN)
        pieces = self._draft.pieces(self.open_ids[first_id:])
        while not text.endswith("".join(pieces)):  # the first may be a part of a character
            first_id += 1
            del pieces[0]
        of_draft = _ends(pieces, len(text))
        common = of_target.keys() & of_draft.keys()
        for offset in sorted(common, reverse=True):
            if 0 < offset <= len(text) - _KEPT_OPEN:
                yield offset, start + of_target[offset], first_id + of_draft[offset]

    def _is_stable(self, text: str, offset: int, num_tokens: int, num_ids: int) -> bool:
        """Says whether both tokenizers make of what follows alone what they made in the text."""
        rest = text[offset:]
        end = len(self.tokens) - len(self._unfinished())
        return (
            self._draft.after(self._draft.middle, rest) == self.open_ids[num_ids:]
            and self._target.after(self._target.middle, rest) == self.tokens[num_tokens:end]
        )


def num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _ends(pieces: Sequence[str], length: int) -> dict[int, int]:
    """offset in a text of this length, which the pieces end -> how many of them are before it."""
    ends = {length: len(pieces)}
    for index in range(len(pieces) - 1, -1, -1):
        length -= len(pieces[index])
        ends[length] = index
    return ends
