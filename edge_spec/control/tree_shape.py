"""The best static tree of sampled draft tokens (Chen et al. 2024, Sequoia: Scalable and Robust
Speculative Decoding, section 3.1), by dynamic programming over measured acceptance and costs; and
how many rows of any proposal are worth their time, by t(k) and the chance of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import RoundPlan, cut
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget

_SHAPE_ROUNDS = 64  # for which a shape is kept
_DEEPEST = 8  # levels of it
# A draft token is the likeliest of several, so on average its chance is overestimated a little (the
# winner's curse). What another value does: benchmarks/simulate.py.
_CAUTION = 1.2


class KeptShape:
    """The best shape of the trees that a policy asks for; a new one now and then, as acceptance is
    learnt."""

    def __init__(self) -> None:
        self._best: tuple[int, ...] = ()
        self._age = 0
        self._room = (0, 0)  # rows and levels that it was made for

    def fitting(
        self,
        acceptance: Sequence[float],
        costs: RowCosts,
        pass_s: float,
        num_rows: int,
        num_levels: int,
    ) -> tuple[int, ...]:
        """Returns the parents of its rows, () where it is larger than what fits, or no row is worth
        it; the others: see `best_shape`."""
        room = (num_rows, min(num_levels, _DEEPEST))
        old = self._age >= _SHAPE_ROUNDS and room == self._room
        if old or room > self._room:  # not at a text's end, where little fits
            self._best = best_shape(acceptance, costs, pass_s, *room)
            self._age, self._room = 0, room
        self._age += 1
        fits = len(self._best) <= num_rows
        return self._best if fits and len(self._best) > 1 else ()


def best_shape(
    acceptance: Sequence[float], costs: RowCosts, pass_s: float, max_rows: int, max_depth: int
) -> tuple[int, ...]:
    """The parents of the rows of the tree that commits most tokens a second; (-1,) where none is
    faster than plain decoding. Parents come before their children, siblings in their order.

    acceptance: of a row's first, second, ... sampled child: the chance that it is the one that is
    accepted. costs: of the target. pass_s: seconds of the draft's pass for one more level.
    """
    gain = _Gain(tuple(acceptance))
    best, best_rate = (1, 0), 1 / costs.at(1)
    for depth in range(1, max_depth + 1):
        for rows in range(depth + 1, max_rows + 1):
            rate = gain.of_tree(rows, depth) / (costs.at(rows) + depth * pass_s)
            if rate > best_rate:
                best, best_rate = (rows, depth), rate
    parents = [-1]
    gain.unfold(*best, 0, parents)
    return tuple(parents)


class _Gain:
    """Expected tokens of the best trees: T[n, b] of the paper, with a bound on the depth."""

    def __init__(self, acceptance: tuple[float, ...]) -> None:
        self._acceptance = acceptance
        self._forest = lru_cache(maxsize=None)(self._best_forest)

    def of_tree(self, rows: int, depth: int) -> float:
        """Returns the tokens of the best tree of `rows` rows or fewer and `depth` levels below its
        root, which counts as one token."""
        return 1 + (self._forest(rows - 1, depth, 0)[0] if depth else 0.0)

    def unfold(self, rows: int, depth: int, root: int, parents: list[int]) -> None:
        """Appends the rows of that tree below the row `root`, its children first."""
        left = rows - 1
        sizes: list[int] = []
        while depth and left and len(sizes) < len(self._acceptance):
            size = self._forest(left, depth, len(sizes))[1]
            if not size:
                break
            sizes.append(size)
            left -= size
        children = range(len(parents), len(parents) + len(sizes))
        parents += [root] * len(sizes)
        for child, size in zip(children, sizes, strict=True):
            self.unfold(size, depth - 1, child, parents)

    def _best_forest(self, rows: int, depth: int, rank: int) -> tuple[float, int]:
        """Returns what the children of one row from `rank` on add with `rows` rows, and how many of
        these belong to the first of them."""
        if rows <= 0 or rank == len(self._acceptance):
            return 0.0, 0
        best = (0.0, 0)
        for size in range(1, rows + 1):
            own = self._acceptance[rank] * self.of_tree(size, depth - 1)
            gain = own + self._forest(rows - size, depth, rank + 1)[0]
            if gain > best[0] + 1e-12:
                best = (gain, size)
        return best


def plan_rows(
    tree: TokenTree, reach: list[float], limits: Budget, costs: RowCosts, token_s: float
) -> RoundPlan | None:
    """Plans the number of likeliest rows that is worth most; None where that is none.

    reach: of each row, the chance that it and all above it are right. token_s: what a token takes
    at the rate that the time could be spent at otherwise.
    """
    if len(tree) == 1:
        return None
    if tree.draft_probs or not (tree.is_chain or limits.branches):
        # Whether a sampled row is kept must not depend on what comes after it, which depends on
        # its token: a bound that is the same for all rows is blind to that.
        return cut(tree, limits, costs.slope / token_s)
    if tree.required:
        reach = [1.0, *sorted(reach[1:], reverse=True)]
        num_rows = _best_rows(reach[: limits.num_rows], costs, token_s)
        return cut(tree, limits, reach[num_rows - 1] if num_rows > 1 else 1.0)
    order = list(range(len(reach)))
    if not tree.is_chain:  # stable, and no row is likelier than its parent, which stays before it
        order.sort(key=lambda row: -reach[row])
    likeliest = [reach[row] for row in order[: limits.num_rows]]
    num_rows = _best_rows(likeliest, costs, token_s)
    if num_rows == 1:
        return None
    if tree.is_chain:  # most rounds
        return RoundPlan(tree.first_rows(num_rows), None, values=tuple(reach[:num_rows]))
    return RoundPlan(tree.select(sorted(order[:num_rows])), None)


def _best_rows(reach: Sequence[float], costs: RowCosts, token_s: float) -> int:
    """Looks at every number of rows: steps in t(k) are real, and a fourth may be cheaper than a
    third."""
    best, most, tokens = 1, 0.0, -1.0
    rate = _CAUTION / token_s
    for row, more_s in enumerate(costs.further(len(reach))):
        tokens += reach[row]
        won = tokens - rate * more_s
        if won > most:
            best, most = row + 1, won
    return best
