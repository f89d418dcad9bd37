"""Suffix lookup: what followed the longest earlier occurrence of the text's end.

The index is a suffix automaton (Blumer et al. 1985) over prompt and output, grown token by token
in amortised constant time, as in SAM decoding (Hu et al. 2024). Confidence comes from the length
of the match: longer matches are continued more reliably, and how much more is learnt from the
outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from edge_spec.drafters.protocol import Budget
from edge_spec.model import Forward
from edge_spec.tree import TokenTree, Verdict


class Match(NamedTuple):
    length: int  # tokens of the text's end that occurred before; 0: none did
    end: int  # position just after that earlier occurrence


class SuffixIndex:
    """The suffix automaton of a growing token sequence. State 0 is the empty string."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match = Match(0, 0)
        self._last = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # of each state, the end of a recent occurrence

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def continuation(self, count: int) -> list[int]:
        """`count` tokens after the match's earlier occurrence; where they run into the text's end
        the text is taken to repeat itself. Empty where nothing matched."""
        if self.match.length == 0:
            return []
        period = len(self.tokens) - self.match.end
        return [self.tokens[self.match.end + i % period] for i in range(count)]

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        current = self._new_state({}, len(self.tokens), len(self.tokens))
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state != -1:
            self._link[current] = self._suffix_state(state, token)
        else:
            self._link[current] = 0
        self._last = current
        # The suffix link leads to the longest suffix that also occurs elsewhere.
        matched = self._link[current]
        self.match = Match(self._length[matched], self._end[matched])
        self._end[matched] = len(self.tokens)

    def _suffix_state(self, state: int, token: int) -> int:
        """The state of state's longest string followed by `token`, split off if need be."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._new_state(dict(self._next[target]), length, self._end[target])
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != -1 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class MatchAcceptance:
    """P(a copied token is right), by the length of the match before it; learnt from outcomes."""

    # Shortest match of each bucket, and the acceptance before anything was seen: measured over
    # greedy outputs of a 135M chat model on six kinds of prompts (benchmarks/suffix.py
    # --acceptance).
    _STARTS = (1, 2, 3, 4, 6, 9, 14, 21)
    _PRIORS = (0.28, 0.55, 0.68, 0.79, 0.81, 0.86, 0.92, 0.97)
    _PRIOR_WEIGHT = 12.0  # outcomes that a prior counts for

    def __init__(self) -> None:
        self._seen = np.full(len(self._STARTS), self._PRIOR_WEIGHT)
        self._accepted = self._seen * self._PRIORS
        self._bucket = np.searchsorted(self._STARTS, np.arange(self._STARTS[-1] + 1), "right") - 1

    def estimate(self, match_length: int, rows: int) -> list[float]:
        """For each copied row, given that those before it were right."""
        lengths = np.minimum(np.arange(match_length, match_length + rows), self._STARTS[-1])
        buckets = self._bucket[lengths]
        estimates: list[float] = (self._accepted[buckets] / self._seen[buckets]).tolist()
        return estimates

    def observe(self, match_length: int, accepted: bool) -> None:
        bucket = self._bucket[min(match_length, self._STARTS[-1])]
        self._seen[bucket] += 1
        self._accepted[bucket] += accepted


class SuffixDrafter:
    name = "suffix"

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._acceptance = MatchAcceptance()

    def begin(self, prompt: Sequence[int]) -> None:
        known = self._index.tokens
        if known != list(prompt[: len(known)]):
            self._index = SuffixIndex()
            known = self._index.tokens
        self._index.extend(prompt[len(known) :])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        guesses = self._index.continuation(budget.num_draft_tokens)
        confidence = self._acceptance.estimate(self._index.match.length, len(guesses))
        return TokenTree.chain(pending, guesses, confidence, self.name)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        if self.name in tree.proposed_by:
            length = self._index.match.length
            for guess, token in zip(tree.tokens[1:].tolist(), verdict.tokens, strict=False):
                self._acceptance.observe(length, guess == token)
                if guess != token:
                    break
                length += 1
        self._index.extend(verdict.tokens)
