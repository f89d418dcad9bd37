"""Forecasts what drafters would gain on recorded texts at the costs of a measured place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import Policy
from edge_spec.core.metrics import Stats
from edge_spec.core.model import Capabilities, Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.exactness.batch_invariance import BatchInvariance
from edge_spec.exactness.lossless import Losslessness
from edge_spec.models.resolve import ResolvedModel
from edge_spec.placement.profile import TYPICAL_TOKENS, Profile
from edge_spec.placement.replay import MAX_ROWS, PassCost, Recording, VirtualClock, replay

CONTEXT_STEP = 32  # tokens, within which t(k) is taken to be the same


class RealTime(Drafter):
    """Another drafter, whose own work takes as long on a virtual clock as it does here."""

    def __init__(
        self,
        drafter: Drafter,
        virtual: VirtualClock,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._virtual = virtual
        self._clock = clock

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        start = self._clock()
        tree = self._drafter.propose(pending, budget)
        self._virtual.advance(self._clock() - start)
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        start = self._clock()
        self._drafter.observe(tree, out, verdict)
        self._virtual.advance(self._clock() - start)


def pass_costs(profile: Profile) -> PassCost:
    """Seconds of a round without its drafting: the pass, reading its logits, and its commit."""
    known: dict[int, RowCosts] = {}

    def pass_s(rows: int, context_tokens: int) -> float:
        step = context_tokens // CONTEXT_STEP
        if step not in known:
            known[step] = profile.costs(step * CONTEXT_STEP)
        return known[step].at(rows) + rows * profile.logits_row_s + profile.commit_s

    return pass_s


def replay_drafters(
    names: str,
    prepared: ResolvedModel,
    profile: Profile,
    recordings: Sequence[Recording],
    lossless: Losslessness | None = None,
) -> list[Stats]:
    """Replays drafters that need no second model and no part of the target, which begin again: what
    they keep from one run to the next is put aside. lossless: how passes are padded. Raises an
    EdgeSpecError."""
    with TemporaryDirectory() as scratch:
        setting = DrafterContext(
            prepared.config.vocab_size,
            tokens=prepared.vocabulary,
            answers_file=Path(scratch) / "answers",
        )
        speculation_factory = SpeculationFactory(
            setting,
            Capabilities(MAX_ROWS, trees=True, rollback=True, hidden_states=False),
            BatchInvariance(0.0, (), branch_invariant=profile.branches),
            lossless=Losslessness(widths=lossless.widths if lossless else ()),
            costs=lambda: profile.costs(TYPICAL_TOKENS),
        )
        speculation = speculation_factory.compose(factory.load_drafters(names, setting))

        def speculate(clock: VirtualClock) -> tuple[Sequence[Drafter], Policy]:
            drafters = [RealTime(drafter, clock) for drafter in speculation.drafters]
            return drafters, speculation.policy

        try:
            return replay(recordings, setting.vocab_size, speculate, pass_costs(profile))
        finally:
            speculation.close()
