"""The promise that a text equals plain decoding's, and how it is kept.

A kernel may score a row otherwise in a pass of another width, and near ties then flip. Where none
does, by how they compute, passes may have any rows. Elsewhere three ways lead around it: passes
keep to widths whose rows agree bit for bit, plain steps included (the plain width is the narrowest
of them, and its further rows hold no token or a draft token, which costs nothing more); a near tie
of a wider pass is left to a plain step; or near ties are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from edge_spec.control.policy import Policy, RoundPlan
from edge_spec.core.metrics import RoundStats
from edge_spec.core.tree_pruning import chain_first
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.errors import UsageError
from edge_spec.exactness.batch_invariance import BatchInvariance

# Of the fastest plain step: what a plain step may take more for texts that are bit-identical,
# unless they have to be at any price. Most of it is not lost, since its further rows carry draft
# tokens: where a second row took 0.27 to 0.35, on onnxruntime without AVX-512, the rate over 76
# prompts was 1.01 of that with near ties that may differ (benchmarks/exact.py).
MOST_PADDING = 0.4
# In logits: noise beyond which so many choices are near ties that to leave them to plain steps
# would cost more than it is worth by default. A choice in 100 is as close as 0.1.
MOST_REPLAYED_NOISE = 0.5
# What was seen over a few tokens need not be the worst.
REPLAY_SAFETY = 2.0


class ExactPolicy:
    """Another policy's plans, cut and padded to `widths`, ascending and not empty.

    Only chains are kept: where the rows of a branch were seen to agree, rounding may have hidden
    that they do not. probes: whether a chain's rows agree where others come after it, which it does
    not see.
    """

    def __init__(self, policy: Policy, widths: Sequence[int], probes: bool = False) -> None:
        self._policy = policy
        self._widths = widths
        self._probes = probes

    def begin(self, num_prompt: int = 0) -> None:
        self._policy.begin(num_prompt)

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        """The narrowest width has to fit the budget's rows."""
        widths = [width for width in self._widths if width <= budget.num_rows]
        limits = replace(
            budget,
            num_draft_tokens=min(budget.num_draft_tokens, widths[-1] - 1),
            num_rows=widths[-1],
            branches=False,
            probes=budget.probes and self._probes,
        )
        plan = self._policy.choose(drafters, pending, limits)
        tree = chain_first(plan.tree, widths[-1])
        verified = tree.leading_chain
        if not limits.probes:
            tree = tree.first_rows(verified)
        width = min(width for width in widths if width >= len(tree))
        values = plan.values[: len(tree)] if tree.is_chain and verified == len(tree) else ()
        return RoundPlan(tree, plan.plain_reason, width, verified, values, plan.resting)

    def wants(self, drafter: Drafter) -> bool:
        return self._policy.wants(drafter)

    def observe(self, round_stats: RoundStats) -> None:
        self._policy.observe(round_stats)

    def beliefs(self) -> str:
        return self._policy.beliefs()


class LosslessMode(StrEnum):
    """A user's wish: `--lossless`."""

    AUTO = "auto"  # bit-identical wherever that is cheap
    ALWAYS = "always"  # at any price
    TIES = "ties"  # near ties may differ

    @classmethod
    def parse(cls, name: str) -> LosslessMode:
        """Raises UsageError."""
        try:
            return cls(name)
        except ValueError:
            raise UsageError(
                f"there is no lossless mode {name!r}", remedy=f"Choose one of {', '.join(cls)}."
            ) from None


class Promise(StrEnum):
    """The promise for greedy texts; sampled ones have the model's distribution in any case."""

    BY_CONSTRUCTION = "bit-identical, by construction"
    BIT_IDENTICAL = "bit-identical"
    REPLAYED = "equal; near ties are decided by plain steps"
    TIES = "near ties may differ"


@dataclass(frozen=True)
class Losslessness:
    """The way in which one target keeps its promise.

    widths: of its passes, ascending; empty where they may have any. plain_cost: a plain step of the
    narrowest of them over the fastest plain step there is. tie_margin: of a greedy choice, in
    logits, below which it may differ from plain decoding's, or is replayed. by_construction:
    whether a row has the same bits in all passes because of how the kernels compute.
    """

    mode: LosslessMode = LosslessMode.TIES
    widths: tuple[int, ...] = ()
    plain_cost: float = 1.0
    replays: bool = False
    tie_margin: float = 0.0
    by_construction: bool = False

    @property
    def promise(self) -> Promise:
        if self.by_construction:
            return Promise.BY_CONSTRUCTION
        if self.widths:
            return Promise.BIT_IDENTICAL
        return Promise.REPLAYED if self.replays else Promise.TIES

    @property
    def is_exact(self) -> bool:
        """Says whether texts are bit-identical to plain decoding's."""
        return self.by_construction or bool(self.widths)

    @property
    def plain_width(self) -> int:
        """Rows of a plain step."""
        return self.widths[0] if self.widths else 1

    @property
    def always(self) -> bool:
        return self.mode is LosslessMode.ALWAYS

    def describe(self) -> str:
        """Says to a user what holds, and what it costs."""
        if self.plain_width == 1:
            return str(self.promise)
        return (
            f"{self.promise}; plain steps have {self.plain_width} rows, at "
            f"{self.plain_cost:.2f} times the time of one"
        )


def keep_promise(
    mode: LosslessMode,
    found: BatchInvariance,
    plain_cost: Callable[[], float],
    replays: bool = True,
) -> Losslessness:
    """Returns the cheapest way that the mode allows. plain_cost: of a pass of `found.plain_width`
    rows over one of a single row; asked only where it decides. replays: whether to leave near ties
    to plain steps is cheap: drafting while the target scores cannot be done then. Near ties are not
    known where the noise is not: passes keep to widths that agree then, at whatever price."""
    if found.by_construction:
        return Losslessness(mode, by_construction=True)
    if mode is LosslessMode.TIES:
        return Losslessness(mode, tie_margin=found.tie_margin)
    is_replayed = replays and REPLAY_SAFETY * found.tie_margin <= MOST_REPLAYED_NOISE
    agreeing = found.invariant_widths if len(found.invariant_widths) > 1 else ()
    if agreeing:
        cost = plain_cost() if agreeing[0] > 1 else 1.0
        needs_them = mode is LosslessMode.ALWAYS or not found.noise_is_known
        if needs_them or cost <= 1 + MOST_PADDING:
            return Losslessness(mode, agreeing, cost)
    if mode is LosslessMode.ALWAYS or (is_replayed and found.noise_is_known):
        return Losslessness(mode, replays=True, tie_margin=REPLAY_SAFETY * found.tie_margin)
    return Losslessness(mode, tie_margin=found.tie_margin)
