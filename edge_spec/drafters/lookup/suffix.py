"""Suffix lookup: what followed the longest earlier occurrence of the text's end.

The index is a suffix automaton (Blumer et al. 1985) over prompt and output, grown in amortised
constant time per token (SAM decoding, Hu et al. 2024). Confidence is learnt by the match's length
and earlier continuations (SuffixDecoding, Oliaro et al. 2024). A predicted answer, such as a file
before a small change, is followed alongside the answer. Where they diverge, the answer's end is
looked up in it, first a little further on, since most changes leave what follows unchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Constraint, Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.composite import StageDrafter
from edge_spec.drafters.protocol import GREEDY, TRAITS, Budget, Drafter, restored_prompt
from edge_spec.drafters.tree_builder import Candidate, LearningDrafter, grow, nothing

# Suffixes counted at each token, longest first: bounds the work in repetitive texts.
_COUNTED_SUFFIXES = 16
_CONTINUATIONS = 8  # per match: common words have hundreds


class SuffixMatch(NamedTuple):
    """A string that ends the text, or would, and occurred before."""

    length: int  # tokens; 0: none
    state: int  # of the index


class Continuation(NamedTuple):
    token: int
    times: int  # that it followed the match
    total: int  # that anything did
    match: SuffixMatch  # including the token


class SuffixIndex:
    """The suffix automaton of a growing token sequence. State 0 is the empty string."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match = SuffixMatch(0, 0)  # longest suffix of the text that occurred before
        self.is_whole = True  # an interrupt may leave a token half read
        self._last = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]  # of a state's strings
        self._end = [0]  # position after the latest occurrence

    def extend(self, tokens: Iterable[int]) -> None:
        self.is_whole = False
        for token in tokens:
            self._append(token)
        self.is_whole = True

    def continuations(self, match: SuffixMatch) -> list[Continuation]:
        """Return what followed a match, most frequent and latest first. If the match occurs only at
        the text's end, assumes that the text repeats itself."""
        length, state = match
        if length and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if length == 0:
            return []
        following = self._next[state]
        counts = self._count
        total = sum(counts[target] for target in following.values())
        best = list(following.items())
        if len(best) > 1:
            ends = self._end
            best = nlargest(_CONTINUATIONS, best, key=lambda item: (counts[item[1]], ends[item[1]]))
        return [
            Continuation(token, counts[target], total, SuffixMatch(length + 1, target))
            for token, target in best
        ]

    def follow(self, match: SuffixMatch, token: int) -> SuffixMatch:
        """Return the longest suffix of match and token that occurred before. Leaves the index
        unchanged."""
        length, state = match
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return SuffixMatch(0, 0)
        return SuffixMatch(length + 1, self._next[state][token])

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        position = len(self.tokens)
        current = self._new_state({}, position, 0, position)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        self._link[current] = 0 if state == -1 else self._suffix_state(state, token)
        self._last = current
        # The suffix link leads to the longest suffix that also occurs elsewhere.
        matched = self._link[current]
        self.match = SuffixMatch(self._length[matched], matched)
        state = current
        for _ in range(_COUNTED_SUFFIXES):
            if state == 0:
                break
            self._count[state] += 1
            self._end[state] = position
            state = self._link[state]

    def _suffix_state(self, state: int, token: int) -> int:
        """Return the state of `state`'s longest string followed by `token`, split off if
        necessary."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._new_state(
            dict(self._next[target]), length, self._count[target], self._end[target]
        )
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, following: dict[int, int], length: int, count: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(count)
        self._end.append(end)
        return len(self._next) - 1


# Kinds of draft token: rows by match length (lower bounds), columns by earlier continuations.
# Priors measured over greedy texts of a 135M chat model on six kinds of prompts (reliability:
# benchmarks/drafters.py).
_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 21)
# always once, always twice, always, then by this token's share
_ALWAYS, _MOSTLY, _OFTEN, _RARELY = range(2, 6)
_PRIORS = (
    (0.36, 0.60, 0.76, 0.48, 0.20, 0.08),
    (0.61, 0.73, 0.85, 0.60, 0.28, 0.13),
    (0.70, 0.87, 0.90, 0.60, 0.29, 0.13),
    (0.80, 0.86, 0.97, 0.60, 0.30, 0.15),
    (0.83, 0.89, 0.98, 0.60, 0.33, 0.12),
    (0.89, 0.95, 0.98, 0.62, 0.40, 0.10),
    (0.93, 0.98, 0.99, 0.65, 0.42, 0.08),
    (0.98, 0.98, 0.99, 0.65, 0.42, 0.08),
)


def kind_of_candidate(candidate: Continuation) -> int:
    if candidate.times == candidate.total:
        column = min(candidate.times, _ALWAYS + 1) - 1
    else:
        share = candidate.times / candidate.total
        column = _MOSTLY if share >= 0.6 else _OFTEN if share >= 0.3 else _RARELY
    row = bisect_right(_LENGTHS, candidate.match.length - 1) - 1
    return row * len(_PRIORS[0]) + column


class SuffixDrafter(LearningDrafter, StageDrafter):
    name = "suffix"
    traits = TRAITS["suffix"]

    def __init__(self) -> None:
        super().__init__([prior for row in _PRIORS for prior in row])
        self._index = SuffixIndex()
        self._assumed: list[SuffixMatch] = []  # match after each assumed token

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        super().begin(prompt, sampler)
        self._assumed.clear()
        known = self._index.tokens
        if not self._index.is_whole or known != list(prompt[: len(known)]):
            self._index = SuffixIndex()
            self._acceptance.begin_text()
            known = self._index.tokens
        self._index.extend(prompt[len(known) :])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        match = self._assumed[-1] if self._assumed else self._index.match
        self._growth = grow(self.name, pending, budget, self._acceptance, match, self._expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._assumed.clear()
        self._index.extend(verdict.tokens)

    def skip(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth = nothing(verdict.next_token)
        self._assumed.clear()
        self._index.extend(verdict.tokens)

    def extend_draft(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        match = self._assumed[-1] if self._assumed else self._index.match
        for token in verdict.tokens:
            match = self._index.follow(match, token)
            self._assumed.append(match)

    def rollback_draft(self, keep: int) -> None:
        del self._assumed[keep:]

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        text = {} if learnt_only else {"text": np.array(self._index.tokens, np.int32)}
        return {**super().state(learnt_only), **text}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Load a snapshot; changes nothing if it raises."""
        if learnt_only:
            return super().load(state, learnt_only)
        text = restored_prompt(state["text"])
        super().load(state)
        self._index = SuffixIndex()
        self._index.extend(text)

    def _expand(self, match: SuffixMatch) -> list[Candidate[SuffixMatch]]:
        return [
            Candidate(each.token, kind_of_candidate(each), each.match)
            for each in self._index.continuations(match)
        ]


# Kinds of draft token, by the number of preceding tokens that answer and prediction share.
_SHARED = (1, 2, 3, 4, 6, 9, 14)
_PREDICTED_PRIORS = (0.45, 0.65, 0.8, 0.85, 0.9, 0.93, 0.96)
_BEGINNING = 3  # initial value: the whole text is expected
_COMPARED = 8  # tokens compared to tell occurrences of a token apart
_TRIED = 16  # occurrences tried on each side; bounds the work in repetitive texts
_NEAR = 32  # tokens ahead within which one shared token is enough
_FAR = 3  # shared tokens that are enough anywhere


class _Place(NamedTuple):
    """A place in the prediction, and how many tokens before it match the answer's."""

    next: int
    shared: int


class PredictedText:
    """A predicted text, and how far an answer has followed it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._places: dict[int, list[int]] = {}  # by token, ascending
        for place, token in enumerate(self._tokens):
            self._places.setdefault(token, []).append(place)
        self._text: deque[int] = deque(maxlen=_COMPARED)  # the answer's last tokens
        self._parted = 0  # last certain place in the prediction
        self._appeared = bytearray(len(self._tokens))
        self.place: _Place | None = _Place(0, _BEGINNING)  # None: the two diverge

    @property
    def num_appeared(self) -> int:
        return sum(self._appeared)

    def follow(self, tokens: Iterable[int]) -> None:
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
        return self._tokens[place.next] if place.next < len(self._tokens) else None

    def _found(self, place: _Place) -> None:
        self.place = place
        if place.shared > 1:  # one token may match by chance
            begin = max(0, place.next - min(place.shared, _COMPARED))
            self._appeared[begin : place.next] = b"\x01" * (place.next - begin)
        if place.shared >= _FAR:
            self._parted = place.next

    def _searched(self, token: int) -> _Place | None:
        """Return the place after the longest occurrence of the answer's end, preferring nearby
        ones."""
        places = self._places.get(token, [])
        middle = bisect_left(places, self._parted)
        before = places[max(0, middle - _TRIED) : middle]
        tried = [*places[middle : middle + _TRIED], *reversed(before)]
        near = range(self._parted, self._parted + _NEAR + 1)
        found = [(place, self._num_shared(place)) for place in tried]
        enough = [
            _Place(place + 1, shared) for place, shared in found if shared >= _FAR or place in near
        ]
        return max(enough, key=lambda place: place.shared, default=None)

    def _num_shared(self, place: int) -> int:
        """Count the tokens up to a place that match the answer's end."""
        count = 0
        for token in reversed(self._text):
            if count > place or self._tokens[place - count] != token:
                break
            count += 1
        return count


class PredictionDrafter(LearningDrafter):
    """Drafts for one answer; what it learns does not apply to other predictions."""

    name = "prediction"

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(_PREDICTED_PRIORS)
        self._prediction = PredictedText(tokens)
        self._num_known: int | None = None  # length of prompt and answer

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        """Continue an answer, also one that other drafters began."""
        if self._num_known is not None:
            self._prediction.follow(prompt[self._num_known :])
        self._num_known = len(prompt)
        super().begin(prompt, sampler)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        place = self._prediction.place
        if place is None:
            self._growth = nothing(pending)
        else:
            self._growth = grow(self.name, pending, budget, self._acceptance, place, self._expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._prediction.follow(verdict.tokens)
        self._num_known = (self._num_known or 0) + len(verdict.tokens)

    def _expand(self, place: _Place) -> list[Candidate[_Place]]:
        token = self._prediction.token_at(place)
        if token is None:
            return []
        kind = bisect_right(_SHARED, place.shared) - 1
        return [Candidate(token, kind, _Place(place.next + 1, place.shared + 1))]


def num_appeared(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Count the predicted tokens that are in an answer, whoever drafted."""
    followed = PredictedText(prediction)
    followed.follow(answer)
    return followed.num_appeared


# The text is certain, but the target may split it into other tokens.
_CONFIDENCE = 0.95


class ForcedDrafter(Drafter):
    """Proposes a chain where the answer's constraint allows one text only."""

    name = "grammar"

    def __init__(self) -> None:
        self._constraint: Constraint | None = None

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._constraint = sampler.constraint

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        forced = [] if self._constraint is None else self._constraint.forced()
        tokens = forced[: budget.num_draft_tokens]
        return TokenTree.chain(pending, tokens, [_CONFIDENCE] * len(tokens), self.name)
