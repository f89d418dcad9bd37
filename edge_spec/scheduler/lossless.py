"""Keep the output equal to plain decoding, and measure whether batching can change it.

A kernel may score a row differently in a pass of another width, and near ties then flip. With
batch-invariant kernels any width is allowed. Otherwise passes keep to widths whose rows agree bit
for bit (plain steps are padded to the narrowest), or a plain step decides near ties, or near ties
may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from edge_spec.core.model import Model, Restorable, Session
from edge_spec.core.modes import LosslessMode
from edge_spec.core.runtime_protocols import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree, chain_first
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.scheduler.batch_invariance import BatchInvariance, is_large
from edge_spec.scheduler.policy import Policy, RoundPlan, WithinPolicy

# Extra time of padded plain steps, over the fastest one, that identical bits may cost by default.
# Draft tokens in the extra rows win most of it back: where a second row took 0.27 to 0.35
# (onnxruntime without AVX-512), 76 prompts ran at 1.01 of the speed with near ties that may differ
# (benchmarks/exact.py).
MOST_PADDING = 0.4
# In logits: more noise means too many near ties to replay by default. One choice in 100 is within
# 0.1.
MOST_REPLAYED_NOISE = 0.5
# The few measured tokens may miss the worst case.
REPLAY_SAFETY = 2.0


class ExactPolicy(WithinPolicy):
    """Another policy's plans, cut and padded to `widths` (ascending, not empty).

    Keeps chains only: rounding may hide that rows of a branch differ. probes: a chain's rows agree
    when unrelated rows follow.
    """

    def __init__(self, policy: Policy, widths: Sequence[int], probes: bool = False) -> None:
        super().__init__(policy)
        self._widths = widths
        self._probes = probes

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        """Choose a plan. The narrowest width must fit the budget's rows."""
        widths = [width for width in self._widths if width <= budget.num_rows]
        limits = budget._replace(
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


class Promise(StrEnum):
    """The guarantee for greedy output; sampled output has the target's distribution in any case."""

    BY_CONSTRUCTION = "bit-identical, by construction"
    BIT_IDENTICAL = "bit-identical"
    REPLAYED = "equal; near ties are decided by plain steps"
    TIES = "near ties may differ"


@dataclass(frozen=True)
class Losslessness:
    """How one target keeps its promise.

    widths: allowed pass widths, ascending; empty if any. plain_cost: a plain step at the narrowest
    width over the fastest. tie_margin: margin of a greedy choice, in logits, below which it may
    differ from plain decoding or is replayed. by_construction: a row has the same bits in every
    pass.
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
        """Return True if the output is bit-identical to plain decoding."""
        return self.by_construction or bool(self.widths)

    @property
    def plain_width(self) -> int:
        return self.widths[0] if self.widths else 1

    @property
    def always(self) -> bool:
        return self.mode is LosslessMode.ALWAYS

    @property
    def plain_samples(self) -> bool:
        """Return True if sampled text must be decoded plainly, because draws have no margin."""
        return self.replays and self.always

    def describe(self) -> str:
        """Describe the guarantee and its cost to a user."""
        if self.plain_width == 1:
            return str(self.promise)
        return (
            f"{self.promise}; plain steps have {self.plain_width} rows, at "
            f"{self.plain_cost:.2f} times the time of one"
        )


def keep_promise(mode: LosslessMode, found: BatchInvariance, replays: bool = True) -> Losslessness:
    """Return the cheapest way that the mode allows.

    replays: replaying near ties is cheap, as it is unless drafting overlaps. If the noise is
    unknown, passes keep to agreeing widths at any cost.
    """
    if found.by_construction:
        return Losslessness(mode, by_construction=True)
    if mode is LosslessMode.TIES:
        return Losslessness(mode, tie_margin=found.tie_margin)
    is_replayed = replays and REPLAY_SAFETY * found.tie_margin <= MOST_REPLAYED_NOISE
    agreeing = found.invariant_widths if len(found.invariant_widths) > 1 else ()
    if agreeing:
        cost = found.plain_cost if agreeing[0] > 1 else 1.0
        needs_them = mode is LosslessMode.ALWAYS or not found.noise_is_known
        if needs_them or cost <= 1 + MOST_PADDING:
            return Losslessness(mode, agreeing, cost)
    if mode is LosslessMode.ALWAYS or (is_replayed and found.noise_is_known):
        return Losslessness(mode, replays=True, tie_margin=REPLAY_SAFETY * found.tie_margin)
    return Losslessness(mode, tie_margin=found.tie_margin)


_HELD = (40, 23)  # tokens held by the two conversations
_ROWS = ((1, 1), (1, 3), (4, 2), (5, 6), (8, 8))  # rows of the two in one pass
_WIDE_ROWS = (9, 14)  # if a pass has room
_PROMPT, _LARGE_PROMPT = 256, 64  # tokens; a large model needs fewer
# Tokens of a prompt per pass while others decode. On two cores, 32 take as long as a few rounds, at
# 1.33 ms a token (1.27 in a pass of 256).
SLICE_TOKENS = 32


def shares_alike(model: Model, widths: Sequence[int]) -> bool:
    """Return True if chains score bit for bit alike in shared passes and in their own. widths:
    ascending; passes are padded to the next."""
    assert isinstance(model, SharesPasses)
    drawn = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in drawn.integers(0, model.config.vocab_size, count)]

    with ExitStack() as opened:
        own, shared = (
            [opened.enter_context(closing(model.open_session())) for _ in _HELD] for _ in range(2)
        )
        for pair, held in zip(zip(own, shared, strict=True), _HELD, strict=True):
            prompt = tokens(held)
            for session in pair:
                session.prefill(prompt)
        passes = [(counts, wider(sum(counts), widths)) for counts in _ROWS]
        passes += [(_WIDE_ROWS, width) for width in widths if width >= sum(_WIDE_ROWS)]
        for counts, width in passes:
            if width is None:
                continue
            trees = [TokenTree.chain(tokens(1)[0], tokens(count - 1)) for count in counts]
            parts = [PassPart(*each) for each in zip(shared, trees, strict=True)]
            outs = model.forward_together(parts, width)
            for session, tree, part, out in zip(own, trees, parts, outs, strict=True):
                expected = session.forward(tree.padded(wider(len(tree), widths) or 0)).logits
                if not np.array_equal(expected[: len(tree)], out.logits):
                    return False
                session.commit(range(len(tree)))
                part.session.commit(range(len(tree)))
    return True


def slices_alike(model: Model) -> bool:
    """Return True if slices of a prompt leave the same KV cache, bit for bit, as one pass."""
    length = _LARGE_PROMPT if is_large(model.config) else _PROMPT
    length = min(length, model.config.context_length - 1)
    prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, length).tolist()
    sizes = [SLICE_TOKENS, SLICE_TOKENS // 2, 3 * SLICE_TOKENS // 4 + 1]  # used in turn
    states = []
    for whole in (True, False):
        with closing(model.open_session()) as session:
            start = 0
            while start < length:
                end = length if whole else min(length, start + sizes[start % len(sizes)])
                session.prefill(prompt[start:end])
                start = end
            states.append(_state(session))
    read, sliced = states
    return bool(read) and all(np.array_equal(read[name], sliced[name]) for name in read)


def wider(rows: int, widths: Sequence[int]) -> int | None:
    """Return the first width with `rows` rows or more; `rows` without widths; None if none fits."""
    return next((width for width in widths if width >= rows), None) if widths else rows


def _state(session: Session) -> dict[str, np.ndarray]:
    return session.state() if isinstance(session, Restorable) else {}
