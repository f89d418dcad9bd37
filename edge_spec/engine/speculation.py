"""Combines drafters with a policy: what is drafted and verified, and how ties are handled."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from edge_spec.core.metrics import NoOverlap
from edge_spec.core.model import Capabilities
from edge_spec.core.modes import DEFAULT_DRAFT_TOKENS, DraftOverlap
from edge_spec.drafters import factory
from edge_spec.drafters.composite import CompositeDrafter, DrafterGroup, GuardedDrafter
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.jacobi import SpareRowDrafter
from edge_spec.drafters.lookup.suffix import PredictionDrafter
from edge_spec.drafters.protocol import Cost, Drafter
from edge_spec.engine.draft_overlap import OverlappedDrafting, OverlapTrial
from edge_spec.errors import UnsupportedModelError
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.lossless import ExactPolicy, Losslessness
from edge_spec.scheduler.policy import AlwaysVerifyPolicy, FixedPolicy, Policy

if TYPE_CHECKING:
    from edge_spec.drafters.draft.draft_model import Draft

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speculation:
    """Drafters under a policy, and how output stays equal to plain decoding."""

    drafters: Sequence[Drafter]
    policy: Policy
    lossless: Losslessness = field(default_factory=Losslessness)
    overlap: OverlappedDrafting = field(default_factory=OverlappedDrafting)

    @property
    def _all(self) -> DrafterGroup:
        return DrafterGroup(self.drafters)

    def close(self) -> None:
        self.overlap.close()
        for drafter in self.drafters:
            drafter.close()

    def stats(self) -> dict[str, list[float]]:
        """Return how often draft tokens of each kind were right, by drafter, for the next
        session."""
        learnt = self._all.state(learnt_only=True).items()
        return {_drafter_of(name): counts.ravel().tolist() for name, counts in learnt}

    def load_stats(self, stats: Mapping[str, Sequence[float]]) -> None:
        """Load what an earlier session learnt, unless its version differs."""
        names = {name: _drafter_of(name) for name in self._all.state(learnt_only=True)}
        counts = {name: np.array(stats[of]) for name, of in names.items() if of in stats}
        try:
            self._all.load(counts, learnt_only=True)
        except ValueError as error:
            _log.info("what was learnt is of another version: %s", error)

    def state(self) -> dict[str, np.ndarray]:
        return self._all.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load drafters' state. Raises KeyError or ValueError for other drafters' state."""
        self._all.load(state)


@dataclass(frozen=True)
class SpeculationFactory:
    """Knows what one target allows, and combines any drafters that the user asks for."""

    setting: DrafterContext
    capabilities: Capabilities
    batch_invariance: BatchInvariance
    lossless: Losslessness = field(default_factory=Losslessness)
    overlap: bool = False  # drafts run on another device
    draft_overlap: DraftOverlap = DraftOverlap.OFF  # of the first draft, if it anticipates
    costs: Callable[[], RowCosts] | None = None  # of the target's rows, made when first used
    # If set, every draft token is verified; counts what happens.
    always_verify: Counter[str] | None = None

    def forked(self, drafts: Sequence[Draft]) -> SpeculationFactory:
        """Return a factory for another conversation, with these drafts and a copy of the row
        costs."""
        costs, measured = None, self.costs
        if measured is not None:
            costs = cache(lambda: deepcopy(measured()))
        return replace(self, setting=replace(self.setting, drafts=drafts), costs=costs)

    def choose(self, names: str) -> Speculation:
        """Combine drafters by name. Raises UsageError as `factory.load_drafters` does."""
        return self.compose(factory.load_drafters(names, self.setting))

    def compose(self, drafters: Sequence[Drafter]) -> Speculation:
        """Combine drafters under a policy.

        Draft tokens branch only if that changes no logit, so that the output equals plain decoding.
        Raises UnsupportedModelError for a drafter whose hidden states the target does not give.
        """
        self._require_hidden_states(drafters)
        lossless, widths = self.lossless, self.lossless.widths
        trees, branches = self.capabilities.trees, self.branches and not widths
        guarded = self._merged(drafters)
        if lossless.plain_width > 1 and guarded and self.always_verify is None:
            guarded += self._fillers(guarded)
        policy: Policy = FixedPolicy(self._max_draft_tokens, branches=branches, probes=trees)
        if self.always_verify is not None:
            policy = AlwaysVerifyPolicy(self._max_draft_tokens, branches, trees, self.always_verify)
        elif self.costs is not None and guarded:
            paired = {each.name for each in guarded if each.traits.draft_model}
            draft_token_s = dict.fromkeys(paired, self._step_s) if self._step_s else {}
            free = {each.name for each in guarded if not _is_costly(each)}
            free.add(PredictionDrafter.name)  # single answers have one
            costs, limit = self.costs(), self._max_draft_tokens
            if widths:
                costs = costs.padded(widths)
            # Model drafters run only if the user asked for them.
            asked = {each.name for each in guarded if _is_costly(each)}
            policy = AdaptivePolicy(costs, draft_token_s, free, limit, branches, trees, named=asked)
        if widths:
            policy = ExactPolicy(policy, widths, self.batch_invariance.probe_invariant)
        if not guarded:
            lossless = replace(lossless, tie_margin=0.0)  # nothing can differ
        return Speculation(guarded, policy, lossless, self._overlap(guarded))

    def _require_hidden_states(self, drafters: Sequence[Drafter]) -> None:
        for drafter in drafters:
            if drafter.traits.hidden_states and not self.capabilities.hidden_states:
                raise UnsupportedModelError(
                    f"the drafter {drafter.name} needs hidden states, which this runtime does not "
                    "give for this model",
                    remedy="Use another --runtime, or another drafter.",
                )

    def _overlap(self, drafters: Sequence[Drafter]) -> OverlappedDrafting:
        if not any(drafter.traits.draft_model for drafter in drafters):
            return OverlappedDrafting(reads_prompts=self.overlap)
        why_not = NoOverlap.EXACT if self.lossless.replays else None
        if self.draft_overlap is DraftOverlap.OFF:
            why_not = NoOverlap.OFF if self.overlap else NoOverlap.SAME_DEVICE
        trial = OverlapTrial() if self.draft_overlap is DraftOverlap.AUTO and not why_not else None
        return OverlappedDrafting(drafters, trial, why_not, self.overlap)

    @property
    def branches(self) -> bool:
        """Return True if draft tokens may branch without changing a logit."""
        return self.capabilities.trees and self.batch_invariance.branch_invariant

    @property
    def _step_s(self) -> float:
        return self.setting.drafts[0].step_s if self.setting.drafts else 0.0

    @property
    def _max_draft_tokens(self) -> int:
        if self.setting.draft_n_max is not None:
            return self.setting.draft_n_max
        window = self.setting.window
        return max(DEFAULT_DRAFT_TOKENS, window.num_rows - 1 if window else 0)

    def _fillers(self, drafters: Sequence[Drafter]) -> list[Drafter]:
        """Return drafters for the free rows of a padded plain step, if no model drafts."""
        if any(map(_is_costly, drafters)):
            return []
        return [GuardedDrafter(SpareRowDrafter(), self.setting.vocab_size)]

    def _merged(self, drafters: Sequence[Drafter]) -> list[Drafter]:
        """Merge free drafters into one tree where possible, and put model drafters last."""
        free = [each for each in drafters if not _is_costly(each)]
        merged = [each for each in free if each.traits.shares_tree]
        if len(merged) > 1:
            free = [CompositeDrafter(merged), *(each for each in free if each not in merged)]
        chosen = [*free, *(each for each in drafters if _is_costly(each))]
        return [GuardedDrafter(drafter, self.setting.vocab_size) for drafter in chosen]


def _drafter_of(name: str) -> str:
    return name.split("/")[-2]


def _is_costly(drafter: Drafter) -> bool:
    return drafter.traits.cost is Cost.PASS
