"""Drafts from a text that whoever asks expects as the answer: a file before a small change, a form
with its usual values.

The answer is followed through the prediction. While both agree, what comes next there is drafted;
where they part, the answer's last tokens are looked up, first a little further on, since most
changes leave what follows them as it was.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.drafters.tree_builder import Candidate, LearntAcceptance, grow, nothing

# A kind of draft token is one bucket of these: tokens before it that answer and prediction share.
_SHARED = (1, 2, 3, 4, 6, 9, 14)
_PRIORS = (0.45, 0.65, 0.8, 0.85, 0.9, 0.93, 0.96)
_BEGINNING = 3  # of those, that a prediction begins with: the whole text is meant to be the answer
_COMPARED = 8  # tokens at most, to tell places of the same token apart
_TRIED = 16  # of those places, on each side: bounds the work in texts that repeat one token
_NEAR = 32  # tokens further on, within which a single shared token is enough
_FAR = 3  # shared tokens that are enough anywhere


class _Place(NamedTuple):
    """A place in the prediction, and how many tokens before it the answer has, too."""

    next: int
    shared: int


class PredictedText:
    """A predicted text, and how far an answer has come through it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._places: dict[int, list[int]] = {}  # of each token, rising
        for place, token in enumerate(self._tokens):
            self._places.setdefault(token, []).append(place)
        self._text: deque[int] = deque(maxlen=_COMPARED)  # the answer's last tokens
        self._parted = 0  # where the answer was surely in the prediction last
        self._appeared = bytearray(len(self._tokens))
        self.place: _Place | None = _Place(0, _BEGINNING)  # None: the two have parted

    @property
    def num_appeared(self) -> int:
        """Counts the tokens of the prediction that the answer has."""
        return sum(self._appeared)

    def follow(self, tokens: Iterable[int]) -> None:
        """Reads on in the answer."""
        for token in tokens:
            self._text.append(token)
            place = self.place
            if place is not None and self.token_at(place) == token:
                self._found(_Place(place.next + 1, place.shared + 1))
            elif (found := self._searched(token)) is not None:
                self._found(found)
            else:
                self.place = None

    def token_at(self, place: _Place) -> int | None:
        """Returns what comes at a place, if anything does."""
        return self._tokens[place.next] if place.next < len(self._tokens) else None

    def _found(self, place: _Place) -> None:
        self.place = place
        if place.shared > 1:  # one token may be the same by chance
            begin = max(0, place.next - min(place.shared, _COMPARED))
            self._appeared[begin : place.next] = b"\x01" * (place.next - begin)
        if place.shared >= _FAR:
            self._parted = place.next

    def _searched(self, token: int) -> _Place | None:
        """The place after an occurrence of the answer's end: of the longest, and of several of a
        length the nearest one further on."""
        places = self._places.get(token, [])
        middle = bisect_left(places, self._parted)
        near = bisect_right(places, self._parted + _NEAR)
        best: _Place | None = None
        for which in (*range(middle, middle + _TRIED), *range(middle - 1, middle - 1 - _TRIED, -1)):
            if not 0 <= which < len(places):
                continue
            shared = self._num_shared(places[which])
            enough = 1 if middle <= which < near else _FAR
            if shared >= enough and (best is None or shared > best.shared):
                best = _Place(places[which] + 1, shared)
        return best

    def _num_shared(self, place: int) -> int:
        """Counts the tokens up to a place that the answer ends with."""
        count = 0
        for token in reversed(self._text):
            if count > place or self._tokens[place - count] != token:
                break
            count += 1
        return count


class PredictionDrafter(Drafter):
    """Drafts for one answer: what is learnt of a prediction says nothing of the next one."""

    name = "prediction"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._prediction = PredictedText(tokens)
        self._num_known: int | None = None  # tokens of prompt and answer
        self._acceptance = LearntAcceptance(_PRIORS)
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        """Follows an answer that other drafters began."""
        if self._num_known is not None:
            self._prediction.follow(prompt[self._num_known :])
        self._num_known = len(prompt)
        self._growth = nothing(prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        place = self._prediction.place
        if place is None:
            self._growth = nothing(pending)
        else:
            self._growth = grow(self.name, pending, budget, self._acceptance, place, self._expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._prediction.follow(verdict.tokens)
        self._num_known = (self._num_known or 0) + len(verdict.tokens)

    def _expand(self, place: _Place) -> list[Candidate[_Place]]:
        token = self._prediction.token_at(place)
        if token is None:
            return []
        kind = bisect_right(_SHARED, place.shared) - 1
        return [Candidate(token, kind, _Place(place.next + 1, place.shared + 1))]


def num_appeared(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Counts the tokens of a prediction that an answer has: the same whoever drafted it."""
    followed = PredictedText(prediction)
    followed.follow(answer)
    return followed.num_appeared


# The text is certain, its tokens are not: a target may write the same letters in other pieces.
_CONFIDENCE = 0.95


class ForcedDrafter(Drafter):
    """Proposes a chain where the answer's constraint leaves one text only, else nothing."""

    name = "grammar"

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        constraint = self._sampler.constraint if self._sampler is not None else None
        tokens = [] if constraint is None else constraint.forced()[: budget.num_draft_tokens]
        return TokenTree.chain(pending, tokens, [_CONFIDENCE] * len(tokens), self.name)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        pass
