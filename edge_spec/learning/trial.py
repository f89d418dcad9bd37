"""Measures whether a head pays on a user's last answers, against what would draft without it.

The answers are decoded again by the real loop, drafters and policy, on a clock that the measured
times of passes here advance; a head's draft tokens take what they take here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import Policy
from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import MedusaHead
from edge_spec.core.model import Capabilities, Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.distill.draft_runs import median_s
from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.heads.medusa import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.protocol import Budget, Cost, Drafter
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.errors import UnsupportedModelError
from edge_spec.exactness.batch_invariance import BatchInvariance
from edge_spec.exactness.lossless import Losslessness
from edge_spec.learning.texts import LearntText
from edge_spec.loader.head import head_backend
from edge_spec.models import runtimes
from edge_spec.placement.replay import (
    MAX_ROWS,
    Charged,
    DraftCost,
    Recording,
    VirtualClock,
    replay,
)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Place:
    """Says how the target runs here. pass_s: by rows. widths: of its passes, empty where they may
    have any (`exactness.lossless`). branches: whether draft tokens may branch."""

    pass_s: Annotated[dict[int, _Seconds], Field(min_length=1)]
    widths: tuple[int, ...] = ()
    branches: bool = True
    draft_n_max: int | None = None


@dataclass(frozen=True)
class Replayed:
    """Holds what all texts took together. stats: how often the head's draft tokens were right, by
    kind."""

    seconds: float
    tokens_a_round: float
    stats: dict[str, list[float]] = field(default_factory=dict)


def replay_texts(
    texts: Sequence[LearntText], target: ModelConfig, place: Place, head: MedusaNetwork | None
) -> Replayed:
    """Decodes them again with what "auto" would draft with, in the order of the texts."""
    setting = DrafterContext(target.vocab_size, draft_n_max=place.draft_n_max, head=head)
    speculations: list[Speculation] = []
    costs = RowCosts(place.pass_s)
    factory_ = SpeculationFactory(
        setting,
        Capabilities(MAX_ROWS, trees=True, rollback=True, hidden_states=True),
        BatchInvariance(0.0, (), branch_invariant=place.branches),
        lossless=Losslessness(widths=place.widths),
        costs=lambda: RowCosts(place.pass_s),
    )
    drafted_s = 0.0 if head is None else draft_s(head, target)

    def speculate(clock: VirtualClock) -> tuple[Sequence[Drafter], Policy]:
        speculation = factory_.compose(factory.load_drafters("auto", setting))
        speculations.append(speculation)
        return [
            _charged(each, drafted_s, clock) for each in speculation.drafters
        ], speculation.policy

    recordings = [_recording(each, with_states=head is not None) for each in texts]
    try:
        found = replay(
            recordings, target.vocab_size, speculate, lambda rows, context: costs.at(rows)
        )
        stats = speculations[0].stats()
    finally:
        for each in speculations:
            each.close()
    rounds = sum(each.rounds for each in found)
    tokens = sum(each.predicted_n for each in found)
    seconds = sum(each.predicted_ms for each in found) / 1e3
    kept = {name: counts for name, counts in stats.items() if name == MedusaNetwork.kind}
    return Replayed(seconds, tokens / max(1, rounds), kept)


def draft_s(head: MedusaNetwork, target: ModelConfig) -> float:
    """Seconds of a round's drafting, as `median_s` has it."""
    drafter = MedusaDrafter(head)
    states = np.ones((1, target.hidden_size), np.float32)
    out = Forward(np.zeros((1, target.vocab_size), np.float32), states)
    budget = Budget(head.num_heads, 1 + head.num_heads, branches=False)
    drafter.begin([0])

    def round_() -> None:
        drafter.observe(TokenTree.chain(0), out, Verdict((0,), (), False))
        drafter.propose(0, budget)

    return median_s(round_)


def best_head(without: Replayed, with_heads: Mapping[str, Replayed], margin: float) -> str | None:
    """The fastest one, where it is faster than none by so much, in shares of the time."""
    if not with_heads:
        return None
    name = min(with_heads, key=lambda each: with_heads[each].seconds)
    return name if with_heads[name].seconds * (1 + margin) <= without.seconds else None


def _charged(drafter: Drafter, drafted_s: float, clock: VirtualClock) -> Drafter:
    """Charges the time of a head; what looks up the text takes next to nothing."""
    if drafter.traits.cost is not Cost.PASS:
        return drafter
    charged = Charged(drafter, DraftCost(propose_s=drafted_s), clock)
    charged.traits = drafter.traits
    return charged


def _recording(text: LearntText, *, with_states: bool) -> Recording:
    tokens = text.tokens.astype(np.int32)
    return Recording(
        "",
        text.prompt,
        tuple(text.tokens.tolist()),
        tokens[:, None],
        np.zeros((len(tokens), 1), np.float32),
        text.states.astype(np.float32) if with_states else None,
    )


def open_learnt_head(path: Path, target: ModelConfig, threads: int | None = None) -> MedusaNetwork:
    """Opens a head; what is made of its matrices is kept nowhere else: it is to be forgotten with
    the head. Raises an EdgeSpecError, ValueError, OSError for what is no head of this target."""
    head = runtimes.open_head(path, target)
    if not isinstance(head, MedusaHead):
        raise UnsupportedModelError(f"{path} is no head that was learnt here", remedy="Remove it.")
    return MedusaNetwork(head, head_backend(path, "", target.hidden_size, threads, keeps=False))
