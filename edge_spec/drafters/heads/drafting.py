"""Drafts with a trained head: a chain, a tree of its likeliest tokens, or samples.

Serial heads (EAGLE, assistants) continue from the path without its last token. Independent heads
know only a path's length: any of a head's tokens may follow any before, and the tree holds the
paths with the highest product of chances.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge_spec.core.heads import HeadScores
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_tree import (
    PRIORS,
    SIBLING_KINDS,
    SIBLINGS,
    DraftChooser,
    Line,
    candidates_after,
    kinds_of,
    ranked,
    sample_shape,
)
from edge_spec.drafters.draft.synced_session import Path
from edge_spec.drafters.heads.features import LastState, TextEntries
from edge_spec.drafters.heads.layers import HeadNetwork
from edge_spec.drafters.lookup.recycling import top_tokens
from edge_spec.drafters.protocol import GREEDY, Budget
from edge_spec.drafters.tree_builder import Candidate, Growth, LearningDrafter, grow, nothing

_MAX_ROWS = 64  # rows of a sampled tree that may have children


class RowScores(NamedTuple):
    """A head's output for one draft token. likeliest: as in HeadScores; None: not computed."""

    logits: np.ndarray  # [scored tokens]
    ids: np.ndarray | None = None  # [scored tokens] target ids; None: the same
    likeliest: np.ndarray | None = None  # [some] int64
    shares: np.ndarray | None = None  # [some]
    state: np.ndarray | None = None  # [hidden_size], if requested

    def spread(self, vocab_size: int) -> np.ndarray:
        """Return [target vocab] float32 logits; -inf for tokens that are not scored."""
        if self.ids is None:
            return self.logits
        found = np.full(vocab_size, -np.inf, np.float32)
        found[self.ids] = self.logits
        return found

    def ranked(self) -> list[tuple[int, int]]:
        """Return (target token, kind) of the likeliest, descending. Raises ValueError if the
        largest logit is not finite."""
        if self.likeliest is None or self.shares is None:
            peak = self.logits.max()
            if not np.isfinite(peak):  # NaN if any logit is
                raise ValueError("logits that are not finite")
            found = ranked(np.exp(self.logits - peak))
        else:
            found = kinds_of(self.likeliest[:SIBLINGS], self.shares[:SIBLINGS])
        return found if self.ids is None else [(int(self.ids[at]), kind) for at, kind in found]


class HeadDrafter(LearningDrafter):
    """Drafts with the weights of a trained head.

    target: what the head reads. num_heads: independent heads, one per draft token; None: serial.
    in_one_pass: run all heads within the budget at once, else one when the tree reaches its depth.
    """

    def __init__(
        self,
        network: HeadNetwork,
        target: TextEntries | LastState,
        num_heads: int | None = None,
        in_one_pass: bool = True,
    ) -> None:
        super().__init__(PRIORS)
        self.name, self.reported_acceptance = self.traits.head, network.reported_acceptance
        self.passes: int = 0
        self._vocab_size, self._target = network.vocab_size, target
        self._chooser = DraftChooser(network.vocab_size, network.vocab_size)
        self._num_heads, self._in_one_pass = num_heads, in_one_pass
        self._pending = self._count = 0  # this round's token, and maximum of draft tokens
        self._said: dict[Hashable, RowScores] = {}  # by path, or by head
        self._likeliest: dict[Hashable, list[tuple[int, int]]] = {}

    def attach(self, model: Model, session: Session) -> None:
        """Raise UnsupportedModelError if the runtime does not give what the head reads."""
        self._target.attach(session, self.name)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        super().begin(prompt, sampler)
        self._chooser.use_sampler(sampler)
        if self.fault is not None:
            self._target.clear()
        self._target.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._pending, self._count, self.passes = pending, budget.num_draft_tokens, 0
        self._said, self._likeliest = {}, {}
        self._growth = nothing(pending)
        if budget.num_draft_tokens > 0 and self._target.is_ready:
            self._growth = self._sampled(budget) if self._samples else self._grown(budget)
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._target.observe(out, verdict)

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        super().load(state, learnt_only)
        if not learnt_only:
            self._target.clear()

    def close(self) -> None:
        self._target.close()

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        return [self._acceptance.estimate(kind) for kind in SIBLING_KINDS if self._samples]

    @property
    def _samples(self) -> bool:
        return self._chooser.samples and self._num_heads is None

    def _grown(self, budget: Budget) -> Growth:
        most, num_siblings = None, SIBLINGS
        if self._num_heads is None:
            most, num_siblings = budget.num_draft_tokens, SIBLINGS if budget.branches else 1
            budget = budget._replace(free_rows=1)  # a row may be free, but its pass is not
        elif self._in_one_pass:  # deeper rows come with the same pass
            budget = budget._replace(min_reach=budget.worth_scoring)
        given = self.name, self._pending, budget, self._acceptance
        root: Path = ()
        return grow(*given, root, lambda path: self._expand(path)[:num_siblings], most)

    def _sampled(self, budget: Budget) -> Growth:
        if budget.branches and budget.shape:
            given = self.name, self._pending, budget, self._acceptance
            return sample_shape(*given, self._score_tree, _MAX_ROWS, self._chooser.draw)
        line = Line(budget.num_draft_tokens, budget.min_reach, self._acceptance)
        while line.goes_on:
            logits = self._row(line.path).spread(self._vocab_size)
            line.add(self._chooser.choose(logits, line.path))
        return line.growth(self._pending, self.name, sampled=True)

    def _score_tree(self, tree: TokenTree) -> np.ndarray:
        paths = [tuple(tree.tokens[tree.path(row)[1:]].tolist()) for row in range(len(tree))]
        return np.stack([self._row(path).spread(self._vocab_size) for path in paths])

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        if len(path) == self._num_heads:
            return []
        decided_by = self._decided_by(path)
        if decided_by not in self._likeliest:
            self._likeliest[decided_by] = self._ranked(self._row(path), path)
        return candidates_after(path, self._likeliest[decided_by])

    def _decided_by(self, path: Path) -> Hashable:
        """Return what determines the likely tokens after these draft tokens."""
        return path if self._num_heads is None else len(path)

    def _row(self, path: Path) -> RowScores:
        place: Hashable = path if self._num_heads is None else len(path)
        if place not in self._said:
            self.passes += 1
            if self._num_heads is None:
                self._said[path] = self._score(path)
            else:
                all_heads = range(max(len(path) + 1, min(self._num_heads, self._count)))
                heads = all_heads if self._in_one_pass else [len(path)]
                self._said |= zip(heads, self._score_heads(heads), strict=True)
        return self._said[place]

    def _score(self, path: Path) -> RowScores:
        """Return a serial head's output, continuing from the path without its last token."""
        raise NotImplementedError

    def _score_heads(self, heads: Sequence[int]) -> list[RowScores]:
        """Return the output of these independent heads; in one pass, the first ones."""
        raise NotImplementedError

    def _ranked(self, row: RowScores, path: Path) -> list[tuple[int, int]]:
        if self._chooser.reads_logits_alone:
            return row.ranked()
        return self._chooser.ranked(row.spread(self._vocab_size), path)


def head_scores(logits: np.ndarray) -> HeadScores:
    """Return scores from [heads, scored tokens] logits. A head with a NaN logit gets NaN shares."""
    likeliest = top_tokens(logits, min(SIBLINGS, logits.shape[1]))
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = np.take_along_axis(powers, likeliest, axis=1) / powers.sum(axis=1, keepdims=True)
    return HeadScores(logits, likeliest, shares)


def rows_of(found: HeadScores, ids: np.ndarray | None) -> list[RowScores]:
    states = [None] * len(found.logits) if found.states is None else found.states
    return [
        RowScores(logits, ids, *others)
        for logits, *others in zip(found.logits, found.likeliest, found.shares, states, strict=True)
    ]
