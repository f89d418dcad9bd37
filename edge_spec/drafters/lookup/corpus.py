"""Drafts from other texts, files of the user's or earlier answers: what follows the longest end of
the text that occurs in one.

SuffixDecoding (Oliaro et al. 2024) drafts by how often each token followed a match, and SAM
decoding (Hu et al. 2024) looks the text up in a corpus beside the text itself. Here the corpus is
a suffix array, see corpus_index.py. The share of a match's occurrences that a token
follows is no calibrated chance: one occurrence of two tokens is always unanimous and mostly
wrong. So confidence is learnt for kinds of draft tokens that differ in the length of the match, its
occurrences and that share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.lookup.answers import KeptAnswers
from edge_spec.drafters.lookup.corpus_index import MAX_MATCH, CorpusIndex, CorpusMatch
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.drafters.tree_builder import Candidate, grow, nothing

MIN_MATCH = 2  # tokens; what follows a single one is little but the language's common pairs

# A kind of draft token is one bucket of each: tokens of the match, its occurrences, and the share
# of them that the draft token follows; the least of each bucket.
_LENGTHS = (MIN_MATCH, 3, 4, 6, 9, 14)
_OCCURRENCES = (1, 2, 4, 16)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)

# log(P / (1 - P)) of a kind, before anything was seen: of its share, plus of its occurrences,
# plus of its length by what length matters for that share. Fitted to a quarter of the files of
# three collections (the standard library of Python, the sources of three packages, package
# descriptions) against an index of the other three quarters; within 0.1 of what was counted for
# kinds with 300 draft tokens or more.
_OF_SHARE = (-6.2, -5.1, -4.2, -3.2, -2.6, -1.4)
_OF_OCCURRENCES = (0.0, 1.1, 1.9, 2.8)
_OF_LENGTH = (0.0, 0.4, 1.1, 1.9, 2.3, 3.6)
_LENGTH_MATTERS = (0.1, 0.3, 0.3, 0.3, 0.6, 1.0)  # by share

# The same in several corpora: all of one length.
_Matches = tuple[tuple[CorpusIndex, CorpusMatch], ...]


class CorpusDrafter(Drafter):
    """Texts count as one: the longest match decides, wherever it occurs.

    indexes: of texts that stay as they are. answers: those of before, to which what is written here
    is added.
    """

    def __init__(
        self,
        indexes: Sequence[CorpusIndex] = (),
        answers: KeptAnswers | None = None,
        name: str = "corpus",
    ) -> None:
        self.name = name
        self._texts = tuple(indexes)
        self._answers = answers
        self._acceptance = LearntAcceptance(_priors())
        self._text: list[int] = []  # the last MAX_MATCH tokens, the pending one included
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        if self._answers is not None:
            self._answers.begin(prompt)
        self._text = list(prompt[-MAX_MATCH:])
        self._growth = nothing(prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        found = self._longest()
        if found:
            self._growth = grow(self.name, pending, budget, self._acceptance, found, _expand)
        else:
            self._growth = nothing(pending)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._text = [*self._text, *verdict.tokens][-MAX_MATCH:]
        if self._answers is not None:
            self._answers.extend(verdict.tokens)

    def close(self) -> None:
        """Saves the answers; the drafter stays usable."""
        if self._answers is not None:
            self._answers.close()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns what was learnt, "acceptance" [4, kinds] float64; texts are in their files."""
        return {"acceptance": self._acceptance.snapshot()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises KeyError or ValueError for the snapshot of another drafter."""
        self._acceptance.restore(state["acceptance"])

    def _longest(self) -> _Matches:
        answers = self._answers.indexes if self._answers is not None else ()
        found = [(index, index.match(self._text)) for index in (*self._texts, *answers)]
        length = max((match.length for _, match in found), default=0)
        if length < MIN_MATCH:
            return ()
        return tuple(pair for pair in found if pair[1].length == length)


def _expand(found: _Matches) -> list[Candidate[_Matches]]:
    length = found[0][1].length
    occurrences = _num_occurrences(found)
    longer: dict[int, _Matches] = {}
    for index, match in found:
        for token, longer_match in index.following(match):
            longer[token] = (*longer.get(token, ()), (index, longer_match))
    return [
        Candidate(token, _kind(length, occurrences, _num_occurrences(matches)), matches)
        for token, matches in longer.items()
    ]


def _num_occurrences(found: _Matches) -> int:
    return sum(match.num_occurrences for _, match in found)


def _kind(length: int, occurrences: int, count: int) -> int:
    """The number of the kind: draft tokens that follow `count` occurrences of a match."""
    of_length = bisect_right(_LENGTHS, length) - 1
    of_occurrences = bisect_right(_OCCURRENCES, occurrences) - 1
    of_share = bisect_right(_SHARES, count / occurrences) - 1
    return (of_length * len(_OCCURRENCES) + of_occurrences) * len(_SHARES) + of_share


def _priors() -> list[float]:
    """P(right) of each kind, in the order of `_kind`."""
    matters = np.array(_LENGTH_MATTERS)
    logits = (
        np.array(_OF_LENGTH)[:, None, None] * matters
        + np.array(_OF_OCCURRENCES)[:, None]
        + np.array(_OF_SHARE)
    )
    priors: list[float] = (1 / (1 + np.exp(-logits))).ravel().tolist()
    return priors
