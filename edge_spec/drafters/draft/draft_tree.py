"""Trees that a draft model fills with samples, one level per pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import Siblings, TokenTree
from edge_spec.drafters.draft.synced_session import AheadChoice, Path, Reading
from edge_spec.drafters.lookup.recycling import top_tokens
from edge_spec.drafters.protocol import GREEDY, Budget
from edge_spec.drafters.tree_builder import Candidate, Growth, LearntAcceptance

SIBLINGS = 4  # most children of a row

# Kinds of draft token: by share of the draft's preference, first choices and others apart; samples
# by the largest probability of their distribution, since the sample must not decide. Priors: the
# share or, for a first choice, its root: two models agree on the likeliest token more often than
# either is sure. First choices with shares of about 0.25, 0.55 and 0.85 were right in 0.55, 0.86
# and 0.99 of cases with a good draft, in 0.29, 0.62 and 0.80 with a poor one
# (tests/fixtures/recorded_hits.json).
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
_MIDDLES = [(a + b) / 2 for a, b in zip((0.0, *_SHARES), (*_SHARES, 1.0), strict=True)]
FIRST, OTHER, SAMPLED, _SIBLING = range(4)
_SIBLING_PRIORS = (0.75, 0.12, 0.05, 0.02)  # of a row's first, second, ... sampled child
_FIRST_PRIORS = [middle**0.5 for middle in _MIDDLES]
PRIORS = [*_FIRST_PRIORS, *_MIDDLES, *(0.3 + 0.7 * middle for middle in _MIDDLES), *_SIBLING_PRIORS]
SIBLING_KINDS = range(_SIBLING * len(_MIDDLES), len(PRIORS))


class Line:
    """A chain that grows to `count` draft tokens or until it is too unlikely."""

    def __init__(self, count: int, min_reach: float, acceptance: LearntAcceptance) -> None:
        self.choices: list[AheadChoice] = []
        self.confidence: list[float] = []
        self._count = count
        self._min_reach = min_reach
        self._reach = 1.0
        self._acceptance = acceptance

    @property
    def room(self) -> int:
        return self._count - len(self.choices)

    @property
    def goes_on(self) -> bool:
        return self.room > 0 and self._reach >= self._min_reach

    @property
    def path(self) -> Path:
        return tuple(choice.token for choice in self.choices)

    def growth(self, pending: int, drafter: str, sampled: bool) -> Growth:
        tree = TokenTree.chain(pending, self.path, self.confidence, drafter)
        if sampled:
            probs = (choice.draft_probs for choice in self.choices)
            tree = replace(tree, draft_probs=(None, *probs))
        return Growth(tree, (None, *(choice.kind for choice in self.choices)))

    def add(self, choice: AheadChoice) -> None:
        self.choices.append(choice)
        self.confidence.append(self._acceptance.estimate(choice.kind))
        self._reach *= self.confidence[-1]


def ranked(preference: np.ndarray) -> list[tuple[int, int]]:
    """Return (token, kind) of the likeliest tokens, descending."""
    likeliest = top_tokens(preference[None], min(SIBLINGS, len(preference)))[0]
    return kinds_of(likeliest, preference[likeliest] / preference.sum())


def kinds_of(tokens: np.ndarray, shares: np.ndarray) -> list[tuple[int, int]]:
    """Return (token, kind) of tokens with these descending shares, without shares of 0."""
    return [
        (token, kind_of(OTHER if rank else FIRST, share))
        for rank, (token, share) in enumerate(zip(tokens.tolist(), shares.tolist(), strict=True))
        if share > 0
    ]


def candidates_after(path: Path, likeliest: Sequence[tuple[int, int]]) -> list[Candidate[Path]]:
    return [Candidate(token, kind, (*path, token)) for token, kind in likeliest]


def kind_of(table: int, share: float) -> int:
    return table * len(_MIDDLES) + bisect_right(_SHARES, share)


class DraftChooser:
    """Chooses draft tokens greedily, with the target's random numbers, or by sampling. draft_vocab,
    target_vocab: sizes; only ids of both can be chosen."""

    def __init__(self, draft_vocab: int, target_vocab: int) -> None:
        self._vocab_size = min(draft_vocab, target_vocab)
        self._target_vocab = target_vocab
        self.use_sampler(GREEDY)

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.samples = sampler.sampled_drafts

    @property
    def reads_logits_alone(self) -> bool:
        """Return True if the logits' order is the choice's."""
        return self._sampler.prefers_by_logits

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> AheadChoice:
        """Choose from [draft vocab] logits after the text and the draft tokens `path`."""
        return self._choice(self._preference(logits, path))

    def read(self, logits: np.ndarray, path: Sequence[int]) -> Reading:
        """Choose, and keep the likeliest tokens for later."""
        preference = self._preference(logits, path)
        return Reading(self._choice(preference), partial(ranked, preference))

    def ranked(self, logits: np.ndarray, path: Sequence[int]) -> list[tuple[int, int]]:
        return ranked(self._preference(logits, path))

    def draw(self, logits: np.ndarray, path: Path, count: int) -> Draw:
        """Sample up to `count` different tokens, without replacement."""
        probs = self._sampler.probs(self.fitted(logits), path)
        left, tokens = probs.copy(), []
        for _ in range(min(count, int(np.count_nonzero(probs)))):
            tokens.append(self._sampler.draw(left, Purpose.DRAFT))
            left[tokens[-1]] = 0
        return Draw(tokens, SIBLING_KINDS[: len(tokens)], probs)

    def fitted(self, logits: np.ndarray) -> np.ndarray:
        """Return [target vocab] logits. Raises ValueError unless the largest is finite."""
        logits = logits[: self._vocab_size]
        if not np.isfinite(logits.max()):  # NaN if any logit is
            raise ValueError("logits that are not finite")
        missing = self._target_vocab - len(logits)
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing else logits

    def _preference(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        """Return [target vocab] weights, which are probabilities if the draft samples."""
        weigh = self._sampler.probs if self.samples else self._sampler.preference
        return weigh(self.fitted(logits), path)

    def _choice(self, preference: np.ndarray) -> AheadChoice:
        if self.samples:
            token = self._sampler.draw(preference, Purpose.DRAFT)
            return AheadChoice(token, kind_of(SAMPLED, float(preference.max())), preference)
        token = int(preference.argmax())
        return AheadChoice(token, kind_of(FIRST, preference[token] / preference.sum()), None)


Score = Callable[[TokenTree], np.ndarray]  # [rows, vocab] logits


class Draw(NamedTuple):
    """Tokens sampled without replacement, and the first one's distribution."""

    tokens: list[int]
    kinds: Sequence[int]
    probs: np.ndarray  # [vocab]


def sample_shape(
    drafter: str,
    pending: int,
    budget: Budget,
    acceptance: LearntAcceptance,
    score: Score,
    max_rows: int,
    draw: Callable[[np.ndarray, Path, int], Draw],
) -> Growth:
    """Fill the budget's shape with samples, as far as it fits. Leaves out rows for which a
    distribution has too few tokens. score: of a tree of up to `max_rows` rows."""
    children = _fitting(budget, max_rows)
    tokens, parents, confidence = [pending], [-1], [1.0]
    kinds: list[int | None] = [None]
    draft_probs: list[np.ndarray | None] = [None]
    read: list[int] = []
    level = {0: 0}  # node of the shape -> row
    while True:
        tree = TokenTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(confidence, np.float32),
            draft_probs=tuple(draft_probs),
            proposed_by=("", *(drafter,) * (len(tokens) - 1)),
            siblings=Siblings.WITHOUT_REPLACEMENT,
        )
        inner = {node: row for node, row in level.items() if node in children}
        if not inner:
            return Growth(tree, kinds)
        read = sorted([*read, *inner.values()])
        logits = score(tree.select(read))
        level = {}
        for node, row in inner.items():
            path = tuple(tree.tokens[tree.path(row)[1:]].tolist())
            drawn = draw(logits[read.index(row)], path, len(children[node]))
            chance = 1.0
            for child, token, kind in zip(children[node], drawn.tokens, drawn.kinds, strict=False):
                # A sample counts only after those before it, so a policy must not keep it without
                # them.
                chance = min(chance, acceptance.estimate(kind))
                level[child] = len(tokens)
                tokens.append(token)
                parents.append(row)
                confidence.append(chance)
                kinds.append(kind)
                draft_probs.append(drawn.probs)


def _fitting(budget: Budget, max_read: int) -> dict[int, list[int]]:
    """Return the children in the budget's shape that fit, for up to `max_read` nodes."""
    children: dict[int, list[int]] = {}
    depths = {0: 0}
    for node, parent in enumerate(budget.shape[1:], start=1):
        fits = parent in children or len(children) < max_read
        deep = depths.get(parent, budget.num_draft_tokens) >= budget.num_draft_tokens
        if fits and not deep and len(depths) < budget.num_rows:
            depths[node] = depths[parent] + 1
            children.setdefault(parent, []).append(node)
    return children
