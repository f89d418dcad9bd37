"""Drafts of heads that know nothing of what the heads before them have drafted, so that any of a
head's tokens may follow any of those before: the tree holds the likeliest paths, by the product of
the heads' own chances."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from edge_spec.core.heads import HeadScores
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.draft.draft_tree import (
    PRIORS,
    SIBLINGS,
    candidates_after,
    kinds_of,
    ranked,
)
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.lookup.recycling import top_tokens
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.drafters.tree_builder import Candidate, grow, nothing


class RowScores(NamedTuple):
    """Holds what heads say of one draft token: see `HeadScores`."""

    logits: np.ndarray  # [scored tokens]
    likeliest: np.ndarray  # [some] int64
    shares: np.ndarray  # [some]
    state: np.ndarray | None  # [hidden_size], where asked for


class IndependentHeads(Protocol):
    """Heads whose draft tokens are independent of each other."""

    @property
    def num_heads(self) -> int:
        """Tokens that they draft at most, one after the other."""

    @property
    def shares_output(self) -> bool:
        """Says whether those of all heads are scored in one go."""

    @property
    def reported_acceptance(self) -> Sequence[float]:
        """See Drafter."""

    def spread(self, scores: np.ndarray) -> np.ndarray:
        """scores: [..., scored tokens] -> [..., vocab], -inf for tokens that are not scored."""


class IndependentDrafter(Drafter):
    """A head is asked when the tree first gets to its depth; where all are scored in one go, all
    that the budget has room for are."""

    def __init__(self, network: IndependentHeads, name: str) -> None:
        self.name = name
        self._heads = network
        self._acceptance = LearntAcceptance(PRIORS)
        self._growth = nothing(0)
        self._count = 0  # of draft tokens, at most
        self._passes = 0  # of the last proposal
        self._told: dict[int, RowScores] = {}  # by head
        self._likeliest: dict[Hashable, list[tuple[int, int]]] = {}
        self._sampler = Sampler(SamplingParams(), ())

    @property
    def reported_acceptance(self) -> Sequence[float]:
        return self._heads.reported_acceptance

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, prompt: Sequence[int]) -> None:
        self._growth = nothing(prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._told, self._likeliest, self._passes = {}, {}, 0
        self._count = budget.num_draft_tokens
        if self._heads.shares_output:  # what is deeper comes with the same pass
            budget = replace(budget, min_reach=budget.worth_scoring)
        root: Path = ()
        self._growth = nothing(pending)
        if budget.num_draft_tokens > 0 and self._is_ready:
            self._growth = grow(self.name, pending, budget, self._acceptance, root, self._expand)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)

    def stats(self) -> dict[str, np.ndarray]:
        return {self.name: self._acceptance.stats()}

    def load_stats(self, stats: Mapping[str, np.ndarray]) -> None:
        if self.name in stats:
            self._acceptance.load_stats(stats[self.name])

    @property
    def passes(self) -> int | None:
        return self._passes

    @property
    def _is_ready(self) -> bool:
        """Says whether heads have what they draft from."""
        raise NotImplementedError

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Returns what these heads say after the pending token; where all are scored in one go,
        they are the first ones."""
        raise NotImplementedError

    def _decided_by(self, path: Path) -> Hashable:
        """Returns what decides which tokens are likely after these draft tokens."""
        return len(path)

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        if len(path) == self._heads.num_heads:
            return []
        decided_by = self._decided_by(path)
        if decided_by not in self._likeliest:
            self._likeliest[decided_by] = self._ranked(self._row(len(path)), path)
        return candidates_after(path, self._likeliest[decided_by])

    def _row(self, index: int) -> RowScores:
        """Returns what a head says."""
        if index not in self._told:
            all_heads = range(max(index + 1, min(self._heads.num_heads, self._count)))
            heads = all_heads if self._heads.shares_output else [index]
            self._passes += 1
            found = self._ask(heads)
            for row, head in enumerate(heads):
                state = None if found.states is None else found.states[row]
                told = found.logits[row], found.likeliest[row], found.shares[row]
                self._told[head] = RowScores(*told, state)
        return self._told[index]

    def _ranked(self, row: RowScores, path: Path) -> list[tuple[int, int]]:
        """(token, kind of draft token) of a row's likeliest tokens, in falling order."""
        if self._sampler.prefers_by_logits:
            return kinds_of(row.likeliest[:SIBLINGS], row.shares[:SIBLINGS])
        return ranked(self._weigh(self._heads.spread(row.logits)))

    def _weigh(self, logits: np.ndarray) -> np.ndarray:
        """[vocab] what the target would prefer by such logits, whatever was drafted before."""
        sampler = self._sampler
        return (sampler.probs if sampler.sampled_drafts else sampler.preference)(logits, ())


def head_scores(logits: np.ndarray, count: int = SIBLINGS) -> HeadScores:
    """logits: [heads, scored tokens]; count: of the likeliest ones. Shares are NaN where logits
    are."""
    likeliest = top_tokens(logits, min(count, logits.shape[1]))
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = np.take_along_axis(powers, likeliest, axis=1) / powers.sum(axis=1, keepdims=True)
    return HeadScores(logits, likeliest, shares)
