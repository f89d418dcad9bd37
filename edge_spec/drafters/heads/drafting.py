"""Drafts with a trained head: a chain, a tree of its likeliest tokens, or samples.

A head scores what follows a path of draft tokens. Serial heads, as EAGLE's and assistants, go on
from what they made of the path without its last token. Independent heads know nothing of a path but
its length, so that any of a head's tokens may follow any of those before: the tree holds the
likeliest paths, by the product of the heads' own chances.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
    Path,
    Reader,
    candidates_after,
    kinds_of,
    sample_shape,
)
from edge_spec.drafters.draft.synced_session import AheadChoice
from edge_spec.drafters.heads.features import TextEntries
from edge_spec.drafters.heads.layers import HeadNetwork
from edge_spec.drafters.lookup.recycling import top_tokens
from edge_spec.drafters.protocol import GREEDY, Budget
from edge_spec.drafters.tree_builder import Candidate, LearningDrafter, grow, nothing

Scores = TypeVar("Scores")  # what a head says of one draft token
Scores_contra = TypeVar("Scores_contra", contravariant=True)
_MAX_ROWS = 64  # of a tree of samples that have children


class ScoresTokens(Protocol[Scores_contra]):
    """The weights of a serial head."""

    vocab_size: int  # of the target
    reported_acceptance: Sequence[float]  # see Drafter

    def likeliest(self, scores: Scores_contra) -> list[tuple[int, int]]:
        """(token of the target, kind of draft token), in falling order. Raises ValueError for
        scores that no choice can be made by."""

    def spread(self, scores: Scores_contra) -> np.ndarray:
        """[vocab of the target] float32, -inf for tokens that are not scored."""


class HeadDrafter(LearningDrafter, Generic[Scores]):
    """network: drafters of several conversations share it."""

    def __init__(self, network: ScoresTokens[Scores], name: str) -> None:
        super().__init__(PRIORS)
        self.name, self.reported_acceptance = name, network.reported_acceptance
        self.passes: int = 0
        self._weights = network
        self._chooser = DraftChooser(network.vocab_size, network.vocab_size)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        super().begin(prompt, sampler)
        self._chooser.use_sampler(sampler)

    @property
    def _is_ready(self) -> bool:
        """Says whether the head has what it drafts from."""
        raise NotImplementedError


class SerialDrafter(HeadDrafter[Scores]):
    """Drafts with a head that makes each draft token of the one before it."""

    def __init__(self, network: ScoresTokens[Scores], name: str) -> None:
        super().__init__(network, name)
        self._known: dict[Path, Scores] = {}  # what was said in this round

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        if not self._chooser.samples:
            return ()
        return [self._acceptance.estimate(kind) for kind in SIBLING_KINDS]

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self.passes, self._known, samples = 0, {}, self._chooser.samples
        self._growth = nothing(pending)
        if budget.num_draft_tokens <= 0 or not self._is_ready:
            return self._growth.tree
        given = self.name, pending, budget, self._acceptance
        root: Path = ()
        if not budget.branches or (samples and not budget.shape):
            line = Line(budget.num_draft_tokens, budget.min_reach, self._acceptance)
            while line.goes_on:
                line.add(self._choose(line.path))
            self._growth = line.growth(pending, self.name, samples)
        elif samples:
            reader = Reader(self._score_tree, _MAX_ROWS)
            self._growth = sample_shape(*given, reader, self._chooser.draw)
        else:
            self._growth = grow(*given, root, self._expand, budget.num_draft_tokens)
        return self._growth.tree

    def _score(self, path: Path) -> Scores:
        """Returns what the head says after these draft tokens, by a pass that goes on from those of
        the path without its last token."""
        raise NotImplementedError

    def _scores(self, path: Path) -> Scores:
        if path not in self._known:
            self.passes += 1
            self._known[path] = self._score(path)
        return self._known[path]

    # The scores of the tokens that a head scores are read alone where these decide.

    def _choose(self, path: Path) -> AheadChoice:
        scores = self._scores(path)
        if self._chooser.reads_logits_alone:
            return AheadChoice(*self._weights.likeliest(scores)[0], None)
        return self._chooser.choose(self._weights.spread(scores), path)

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        scores = self._scores(path)
        if self._chooser.reads_logits_alone:
            return candidates_after(path, self._weights.likeliest(scores))
        return self._chooser.likeliest(self._weights.spread(scores), path)

    def _score_tree(self, tree: TokenTree) -> np.ndarray:
        """[rows, vocab]"""
        paths = [tuple(tree.tokens[tree.path(row)[1:]].tolist()) for row in range(len(tree))]
        return np.stack([self._weights.spread(self._scores(path)) for path in paths])


class RowScores(NamedTuple):
    """Holds what heads say of one draft token: see `HeadScores`."""

    logits: np.ndarray  # [scored tokens]
    likeliest: np.ndarray  # [some] int64
    shares: np.ndarray  # [some]
    state: np.ndarray | None  # [hidden_size], where asked for


class IndependentDrafter(HeadDrafter[np.ndarray]):
    """A head is asked when the tree first gets to its depth; where all are scored in one go, all
    that the budget has room for are.

    num_heads: draft tokens at most, one after the other. shares_output: whether those of all heads
    are scored in one go.
    """

    def __init__(
        self, network: HeadNetwork, name: str, num_heads: int, shares_output: bool = True
    ) -> None:
        super().__init__(network, name)
        self._num_heads, self._shares_output = num_heads, shares_output
        self._count = 0  # of draft tokens, at most
        self._told: dict[int, RowScores] = {}  # by head
        self._likeliest: dict[Hashable, list[tuple[int, int]]] = {}

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._told, self._likeliest, self.passes = {}, {}, 0
        self._count = budget.num_draft_tokens
        if self._shares_output:  # what is deeper comes with the same pass
            budget = replace(budget, min_reach=budget.worth_scoring)
        root: Path = ()
        self._growth = nothing(pending)
        if budget.num_draft_tokens > 0 and self._is_ready:
            self._growth = grow(self.name, pending, budget, self._acceptance, root, self._expand)
        return self._growth.tree

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        """Returns what these heads say after the pending token; where all are scored in one go,
        they are the first ones."""
        raise NotImplementedError

    def _decided_by(self, path: Path) -> Hashable:
        """Returns what decides which tokens are likely after these draft tokens."""
        return len(path)

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        if len(path) == self._num_heads:
            return []
        decided_by = self._decided_by(path)
        if decided_by not in self._likeliest:
            self._likeliest[decided_by] = self._ranked(self._row(len(path)), path)
        return candidates_after(path, self._likeliest[decided_by])

    def _row(self, index: int) -> RowScores:
        """Returns what a head says."""
        if index not in self._told:
            all_heads = range(max(index + 1, min(self._num_heads, self._count)))
            heads = all_heads if self._shares_output else [index]
            self.passes += 1
            found = self._ask(heads)
            for row, head in enumerate(heads):
                state = None if found.states is None else found.states[row]
                told = found.logits[row], found.likeliest[row], found.shares[row]
                self._told[head] = RowScores(*told, state)
        return self._told[index]

    def _ranked(self, row: RowScores, path: Path) -> list[tuple[int, int]]:
        """(token, kind of draft token) of a row's likeliest tokens, in falling order."""
        if self._chooser.reads_logits_alone:
            return kinds_of(row.likeliest[:SIBLINGS], row.shares[:SIBLINGS])
        return self._chooser.ranked(self._weights.spread(row.logits), ())


def head_scores(logits: np.ndarray, count: int = SIBLINGS) -> HeadScores:
    """logits: [heads, scored tokens]; count: of the likeliest ones. Shares are NaN where logits
    are."""
    likeliest = top_tokens(logits, min(count, logits.shape[1]))
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = np.take_along_axis(powers, likeliest, axis=1) / powers.sum(axis=1, keepdims=True)
    return HeadScores(logits, likeliest, shares)


class FeatureDrafter(LearningDrafter):
    """What drafters have in common that keep entries of the target's features."""

    _target: TextEntries[Any]

    @property
    def _is_ready(self) -> bool:
        return self._target.is_ready

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        super().begin(prompt, sampler)
        self._target.begin(prompt)

    def take_features(self, position: int, features: np.ndarray) -> None:
        """features: [tokens, features_size] of the tokens from `position` on."""
        self._target.store.put(position, features)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._target.observe(out, verdict)

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        super().load(state, learnt_only)
        if not learnt_only:
            self._target.clear()

    def close(self) -> None:
        self._target.close()
