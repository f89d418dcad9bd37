"""What the model wrote before, in this session or an earlier one, it may write again.

Opt-in, for privacy: the file holds the token n-grams of answers, up to four tokens in a row with
how often each was written, in the user's own cache directory. The first n-grams of an answer
begin with the last tokens of its prompt; the rest of a prompt is never counted.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.lookup.ngram_file import MAX_ORDER
from edge_spec.drafters.lookup.ngram_store import NgramStore
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.drafters.tree_builder import Candidate, grow, nothing

SAVE_AFTER_S = 60.0  # between two saves; what is newer than that is lost to a kill

_BRANCHES = 4  # of the followers of a context; the fifth was right in 3 to 4 of 100 cases

# A kind of draft token for each share that its token has of all that followed its context; where it
# has most of them, they differ by how often it was seen.
_SHARES = (0.1, 0.25, 0.5, 0.8)  # the least of each bucket but the first
_COUNTS = (2, 4, 10)  # likewise, within the last share
# One row an order of context. Measured over greedy answers of a 135M chat model to 102 prompts of
# nine categories, each drafted from those before it and its own text; evened out where outcomes
# were few.
_PRIORS = (
    *(0.04, 0.07, 0.12, 0.16, 0.25, 0.30, 0.30, 0.30),
    *(0.04, 0.07, 0.12, 0.24, 0.45, 0.60, 0.60, 0.70),
    *(0.04, 0.11, 0.29, 0.45, 0.80, 0.96, 0.98, 0.99),
)
_KINDS_PER_ORDER = len(_SHARES) + len(_COUNTS) + 1

Context = tuple[int, ...]  # the last tokens of a text, MAX_ORDER at most


class NgramCacheDrafter(Drafter):
    """Drafts what followed the longest known context of three, two or one tokens, by counts
    that outlive the session (`NgramStore`).

    path: the file; its directory is made where it is missing. vocabulary: identifies the meaning
    of token ids. clock: seconds. keeps: what is written is counted for later runs, too. Files are
    read when it is made and written in `begin` and `close` only. Raises UsageError for a
    vocabulary of 2,097,151 tokens or more.
    """

    name = "ngram-cache"

    def __init__(
        self,
        path: Path,
        vocabulary: str,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        keeps: bool = True,
    ) -> None:
        self._store = NgramStore(path, vocabulary, vocab_size)
        self._acceptance = LearntAcceptance(_PRIORS)
        self._clock = clock
        self._keeps = keeps
        self._last_save_s = clock()
        self._context: Context = ()  # ends with the pending token
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int]) -> None:
        """Saves first, where something is new and the last save is SAVE_AFTER_S ago."""
        if self._store.num_unsaved and self._clock() - self._last_save_s > SAVE_AFTER_S:
            self.close()
        self._context = tuple(prompt[-MAX_ORDER:])
        self._growth = nothing(prompt[-1])  # what an interrupted answer left says nothing

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        limit = _BRANCHES if budget.branches else 1

        def expand(context: Context) -> Iterator[Candidate[Context]]:
            return self._draft_tokens(context, limit)

        self._growth = grow(self.name, pending, budget, self._acceptance, self._context, expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """Counts what was written, whoever drafted it."""
        self._growth.teach(self._acceptance, verdict.tokens)
        for token in verdict.tokens:
            for order in range(1, len(self._context) + 1):
                self._store.add(self._context[-order:], token)
            self._context = (*self._context, token)[-MAX_ORDER:]

    def close(self) -> None:
        """Saves what is new; the drafter stays usable."""
        if self._keeps:
            self._store.save()
        self._last_save_s = self._clock()  # also after a failure: not at every answer again

    def state_dict(self) -> dict[str, np.ndarray]:
        """How often draft tokens of each kind were right; the n-grams are in their file."""
        return {"acceptance": self._acceptance.snapshot()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises KeyError or ValueError for the snapshot of another drafter."""
        self._acceptance.restore(state["acceptance"])

    def _draft_tokens(self, context: Context, limit: int) -> Iterator[Candidate[Context]]:
        """The most frequent followers of the longest end of `context` that has any."""
        for order in range(len(context), 0, -1):
            total, best = self._store.lookup(context[-order:], limit)
            for token, count in best:
                state = (*context, token)[-MAX_ORDER:]
                yield Candidate(token, _kind(order, count, total), state)
            if best:
                return


def _kind(order: int, count: int, total: int) -> int:
    evidence = bisect_right(_SHARES, count / total)
    if evidence == len(_SHARES):
        evidence += bisect_right(_COUNTS, count)
    return (order - 1) * _KINDS_PER_ORDER + evidence
