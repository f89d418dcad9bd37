"""Grows trees of draft tokens best first, by learnt acceptance, and merges trees: shared beginnings
once, no two equal siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.protocol import GREEDY, Budget, Drafter

PRIOR_WEIGHT = 60.0  # in outcomes
MEMORY = 512.0  # outcomes after which older ones are halved
RECENT = 1 - 1 / 24  # weight of earlier outcomes in the recent estimate
LONG_WEIGHT = 8.0  # weight of the long-term estimate, in recent outcomes


class OutcomeRate:
    """Counts how often something was right, starting from a prior; halves counts every MEMORY
    outcomes."""

    def __init__(self, prior: float, prior_weight: float) -> None:
        self.seen = prior_weight
        self.right = prior_weight * prior

    def observe(self, right: bool, seen: float = 1.0) -> None:
        if self.seen >= MEMORY:
            self.seen /= 2
            self.right /= 2
        self.seen += seen
        self.right += right


class LearntAcceptance:
    """P(draft token is right | its parent is) for each kind of draft token.

    The mean of a Beta distribution per kind, over all outcomes, is the prior of another over recent
    ones, because what holds for one text must be unlearnt within a few dozen tokens of the next.
    Counts unverified draft tokens too, so kinds not worth verifying are still learnt.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._long = [OutcomeRate(prior, PRIOR_WEIGHT) for prior in priors]
        self._recent_seen = [0.0] * len(priors)
        self._recent_right = [0.0] * len(priors)
        self._estimates = list(priors)

    def estimate(self, kind: int) -> float:
        return self._estimates[kind]

    def observe(self, kind: int, right: bool) -> None:
        self._long[kind].observe(right)
        self._recent_seen[kind] = RECENT * self._recent_seen[kind] + 1
        self._recent_right[kind] = RECENT * self._recent_right[kind] + right
        self._update(kind)

    def begin_text(self) -> None:
        """Forget recent outcomes, which belong to another text."""
        kinds = range(len(self._long))
        self._recent_seen = [0.0 for _ in kinds]
        self._recent_right = [0.0 for _ in kinds]
        for kind in kinds:
            self._update(kind)

    def _update(self, kind: int) -> None:
        rate = self._long[kind]
        long = LONG_WEIGHT * rate.right / rate.seen
        seen = LONG_WEIGHT + self._recent_seen[kind]
        self._estimates[kind] = (long + self._recent_right[kind]) / seen

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        """Return "acceptance", [4, kinds] float64: seen and right outcomes, of all and of recent.
        learnt_only: [2, kinds], of all."""
        seen, right = [rate.seen for rate in self._long], [rate.right for rate in self._long]
        recent = [] if learnt_only else [self._recent_seen, self._recent_right]
        return {"acceptance": np.array([seen, right, *recent])}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        """Load counts. Raises KeyError or ValueError for anything else."""
        counts, kinds = state["acceptance"], len(self._long)
        if learnt_only and counts.size == 2 * kinds:
            counts = np.concatenate([counts.reshape(2, kinds), np.zeros((2, kinds))])
        if counts.shape != (4, kinds):
            raise ValueError(f"acceptance counts of shape {counts.shape} for {kinds} kinds")
        for seen, right in (counts[:2], counts[2:]):
            if not (np.isfinite(seen) & (right >= 0) & (right <= seen)).all():
                raise ValueError("acceptance counts that are none")
        if not (counts[0] > 0).all():
            raise ValueError("acceptance counts without a prior")
        all_seen, all_right, self._recent_seen, self._recent_right = counts.tolist()
        for kind, rate in enumerate(self._long):
            rate.seen, rate.right = all_seen[kind], all_right[kind]
            self._update(kind)


State = TypeVar("State")

# Proposed rows below the budget's min_reach: policies drop them, but the text decides them, so a
# drafter learns when they become likelier.
_UNLIKELY_ROWS = 3


class Candidate(NamedTuple, Generic[State]):
    """A possible next token, its kind, and the state after it."""

    token: int
    kind: int
    state: State


Expand = Callable[[State], Iterable[Candidate[State]]]


class Growth:
    """One round's proposal and the kind of each row; None for rows that teach nothing."""

    def __init__(self, tree: TokenTree, kinds: Sequence[int | None]) -> None:
        self.tree = tree
        self._kinds = kinds  # the pending token's is unused
        self._taught = False

    def teach(self, acceptance: LearntAcceptance, text: Iterable[int]) -> None:
        """Count each draft token that the text after the pending token decides, once per
        proposal."""
        if not self._taught:
            self._taught = True
            for row, right in self.tree.followed(text):
                kind = self._kinds[row]
                if kind is not None:
                    acceptance.observe(kind, right)


def nothing(pending: int) -> Growth:
    return Growth(TokenTree.chain(pending), (0,))


class LearningDrafter(Drafter):
    """Learns the acceptance of its kinds of draft tokens. `_growth` holds the proposal."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._acceptance = LearntAcceptance(priors)
        self._growth = nothing(0)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._growth = nothing(prompt[-1])

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        return self._acceptance.state(learnt_only)

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        self._acceptance.load(state, learnt_only)


def grow(
    drafter: str,
    pending: int,
    budget: Budget,
    acceptance: LearntAcceptance,
    root: State,
    expand: Expand[State],
    most_expanded: int | None = None,
) -> Growth:
    """Grow a tree within the budget, in descending chance that a row is reached and right.

    expand: returns what may follow a state, in any order, without equal tokens; called once per
    row, for at most `most_expanded` rows.
    """
    if not budget.branches:
        return _grow_chain(drafter, pending, budget, acceptance, root, expand)
    tokens, parents, kinds = [pending], [-1], [0]
    confidence, reach, depth = [1.0], [1.0], [0]
    frontier: list[tuple[float, int, int, float, Candidate[State]]] = []
    pushed = expanded = 0
    worth_scoring = budget.worth_scoring

    def push(row: int, state: State) -> None:
        nonlocal pushed, expanded
        if depth[row] == budget.num_draft_tokens or expanded == most_expanded:
            return
        expanded += 1
        rated = [(acceptance.estimate(candidate.kind), candidate) for candidate in expand(state)]
        if len(rated) > 1:
            rated.sort(key=lambda pair: -pair[0])
        left = 1.0  # siblings exclude each other
        for estimate, candidate in rated:
            estimate = min(estimate, left)
            left -= estimate
            chance = reach[row] * estimate
            heappush(frontier, (-chance, pushed, row, estimate, candidate))
            pushed += 1
            if chance < worth_scoring:
                break  # one is enough to learn from; its siblings are even less likely

    unlikely = 0
    push(0, root)
    while frontier and len(tokens) < budget.num_rows and unlikely < _UNLIKELY_ROWS:
        negative, _, parent, estimate, candidate = heappop(frontier)
        row = len(tokens)
        tokens.append(candidate.token)
        parents.append(parent)
        kinds.append(candidate.kind)
        confidence.append(estimate)
        reach.append(-negative)
        depth.append(depth[parent] + 1)
        unlikely += -negative < worth_scoring
        if -negative >= budget.min_reach and len(tokens) < budget.num_rows:
            push(row, candidate.state)
    return Growth(_tree(drafter, tokens, parents, confidence), kinds)


def _grow_chain(
    drafter: str,
    pending: int,
    budget: Budget,
    acceptance: LearntAcceptance,
    root: State,
    expand: Expand[State],
) -> Growth:
    """Grow a chain, which needs no heap."""
    tokens: list[int] = []
    kinds: list[int | None] = [0]
    confidence: list[float] = []
    state, reach = root, 1.0
    for _ in range(min(budget.num_draft_tokens, budget.num_rows - 1)):
        best, most = None, -1.0
        for candidate in expand(state):
            estimate = acceptance.estimate(candidate.kind)
            if estimate > most:
                best, most = candidate, estimate
        if best is None:
            break
        tokens.append(best.token)
        kinds.append(best.kind)
        confidence.append(most)
        reach *= most
        if reach < budget.min_reach and len(tokens) + 1 >= budget.free_rows:
            break
        state = best.state
    return Growth(TokenTree.chain(pending, tokens, confidence, drafter), kinds)


def _tree(
    drafter: str, tokens: list[int], parents: list[int], confidence: list[float]
) -> TokenTree:
    if len(tokens) == 1:
        return TokenTree.chain(tokens[0])
    return TokenTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(confidence, np.float32),
        proposed_by=("", *(drafter,) * (len(tokens) - 1)),
    )


class TreeRows:
    """A growing tree: row 0 is the pending token, parents come first, siblings differ."""

    def __init__(self, pending: int) -> None:
        self.tokens = [pending]
        self.parents = [-1]
        self.drafters: list[list[str]] = [[]]  # by row
        self._required = [False]
        self._rows: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, drafter: str, required: bool = False) -> int:
        """Return the row of this token below this parent, added if new."""
        row = self._rows.setdefault((parent, token), len(self))
        if row == len(self):
            self.tokens.append(token)
            self.parents.append(parent)
            self.drafters.append([])
            self._required.append(False)
        if drafter not in self.drafters[row]:
            self.drafters[row].append(drafter)
        self._required[row] |= required
        return row

    def tree(self, confidence: Sequence[float]) -> TokenTree:
        """Return the tree. confidence: by row, the pending one's unused. Siblings' are scaled to a
        sum of at most 1, since at most one is right."""
        below = [0.0] * len(self)
        for row in range(1, len(self)):
            below[self.parents[row]] += confidence[row]
        pairs = zip(self.parents[1:], confidence[1:], strict=True)
        scaled = [1.0, *(chance / max(1.0, below[parent]) for parent, chance in pairs)]
        return TokenTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.array(scaled, np.float32),
            proposed_by=tuple(map("+".join, self.drafters)),
            required=tuple(self._required) if any(self._required) else (),
        )


def merge(pending: int, trees: Sequence[TokenTree]) -> tuple[TreeRows, list[list[float]]]:
    """Merge trees; also return the confidences that trees have in each row. Every path of every
    tree is a path of the result."""
    rows = TreeRows(pending)
    chances: list[list[float]] = [[]]
    for tree in trees:
        drafters = tree.proposed_by or ("",) * len(tree)
        required = tree.required or (False,) * len(tree)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        confidence = tree.confidence.tolist()
        new_row = [0]
        for row in range(1, len(tree)):
            place = new_row[parents[row]]
            new_row.append(rows.add(place, tokens[row], drafters[row], bool(required[row])))
            if new_row[row] == len(chances):
                chances.append([])
            chances[new_row[row]].append(confidence[row])
    return rows, chances
