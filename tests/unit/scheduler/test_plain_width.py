"""Speculation where rows agree only from some width on, so that plain steps are padded: the real
policy and round loop on a clock that passes alone move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Forward
from edge_spec.core.modes import LosslessMode
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.scheduler.batch_invariance import (
    BatchInvariance,
    measure_batch_invariance,
    widths_for,
)
from edge_spec.scheduler.cost import RowCosts, expected_tokens
from edge_spec.scheduler.lossless import Promise, keep_promise
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB, TOKENS = 40, 600
STEEP = {rows: 1.0 + 0.35 * (rows - 1) for rows in range(1, 17)}
FLAT = {rows: 1.0 + 0.03 * (rows - 1) for rows in range(1, 17)}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StepsOff(ScriptedSession):
    """A pass narrower than `from_width` scores otherwise, and every pass takes its time."""

    def __init__(self, model: StepsOffModel) -> None:
        super().__init__(model)
        self._off = model

    def forward(self, tree: TokenTree) -> Forward:
        self._off.clock.now += self._off.seconds[len(tree)]
        logits = super().forward(tree).logits
        if len(tree) < self._off.from_width:
            seed = [len(self.committed), 7]
            noise = np.random.default_rng(seed).uniform(-1, 1, logits.shape)
            logits = logits + self._off.noise * noise
        return Forward(logits.astype(np.float32))


class StepsOffModel(ScriptedModel):
    def __init__(self, from_width: int, seconds: Mapping[int, float]) -> None:
        super().__init__(random_logits(VOCAB, order=2, scale=1.0), VOCAB, context_length=1024)
        self.from_width = from_width
        self.noise = 0.2
        self.seconds = seconds
        self.clock = Clock()

    def open_session(self) -> ScriptedSession:
        return StepsOff(self)


class RightNowAndThen(Drafter):
    """Drafts what plain decoding writes, each token right with one chance, of which it tells."""

    name = "now-and-then"

    def __init__(self, text: list[int], chance: float, rounds_without: int = 0) -> None:
        self._text, self._chance = text, chance
        self._rng = np.random.default_rng(0)
        self._written = 0
        self._every = rounds_without + 1
        self._rounds = 0

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._rounds += 1
        if self._rounds % self._every:
            return TokenTree.chain(pending)
        ahead = self._text[self._written :][: budget.num_draft_tokens]
        right = self._rng.random(len(ahead)) < self._chance
        drafted = [t if r else (t + 1) % VOCAB for t, r in zip(ahead, right, strict=True)]
        return TokenTree.chain(pending, drafted, [self._chance] * len(drafted), self.name)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._written += len(verdict.tokens)


def factory_of(
    model: StepsOffModel, found: BatchInvariance, mode: LosslessMode
) -> SpeculationFactory:
    seconds = model.seconds
    return SpeculationFactory(
        DrafterContext(VOCAB),
        model.capabilities,
        found,
        keep_promise(mode, replace(found, plain_cost=seconds[found.plain_width] / seconds[1])),
        costs=lambda: RowCosts(seconds),
    )


def write(
    model: StepsOffModel, factory: SpeculationFactory, drafters: list[Drafter]
) -> tuple[list[int], list[RoundStats], float]:
    """The text, its rounds, and the seconds that they took."""
    speculation = factory.compose(drafters)
    session, clock = model.open_session(), model.clock
    decoder = Decoder(session, speculation.drafters, speculation.policy, clock=clock)
    limits = GenerationLimits(
        TOKENS, frozenset(), 1024, max_rows=16, min_rows=factory.lossless.plain_width
    )
    rounds: list[RoundStats] = []
    started = clock.now
    decoding = decoder.decode([1], Sampler(SamplingParams(), [1]), limits, rounds.append)
    text = [token.id for each in decoding for token in each]
    return text, rounds, clock.now - started


def best_rate(seconds: Mapping[int, float], widths: tuple[int, ...], chance: float) -> float:
    """Tokens a second of the best chain of one length, padded, by arithmetic."""
    rates = [
        expected_tokens([chance] * drafted)
        / seconds[min(width for width in widths if width > drafted)]
        for drafted in range(16)
    ]
    return max(rates)


CASES = [
    (from_width, seconds, chance)
    for from_width in (2, 4, 8)
    for seconds in (STEEP, FLAT)
    for chance in (0.3, 0.6, 0.9)
]


@pytest.mark.parametrize(("from_width", "seconds", "chance"), CASES)
def test_exact_mode_reaches_the_rate_that_arithmetic_allows(
    from_width: int, seconds: dict[int, float], chance: float
) -> None:
    model = StepsOffModel(from_width, seconds)
    found = measure_batch_invariance(model, widths_for(16))
    widths = tuple(range(from_width, 17))
    assert found.invariant_widths == widths
    factory = factory_of(model, found, LosslessMode.ALWAYS)
    plain, rounds, plain_s = write(model, factory, [])
    assert plain_s == pytest.approx(TOKENS * seconds[from_width])
    text, rounds, taken_s = write(model, factory, [RightNowAndThen(plain, chance)])
    assert text == plain
    # The rest: what is paid for learning acceptance, and chance over a few hundred rounds.
    assert TOKENS / taken_s > 0.9 * best_rate(seconds, widths, chance)
    assert not any(each.plain_reason is PlainReason.BASELINE for each in rounds)


@pytest.mark.parametrize(
    ("mode", "widths", "margin", "cost", "promise", "plain_width"),
    [
        (LosslessMode.AUTO, (1, 2, 4), 0.0, 1.0, Promise.BIT_IDENTICAL, 1),
        (LosslessMode.AUTO, (2, 4), 0.6, 1.4, Promise.BIT_IDENTICAL, 2),
        (LosslessMode.AUTO, (2, 4), 0.2, 1.41, Promise.REPLAYED, 1),
        (LosslessMode.AUTO, (2, 4), 0.6, 1.41, Promise.TIES, 1),
        (LosslessMode.AUTO, (1,), 0.2, 1.0, Promise.REPLAYED, 1),
        (LosslessMode.AUTO, (1,), 0.6, 1.0, Promise.TIES, 1),
        (LosslessMode.ALWAYS, (8, 12), 0.2, 3.0, Promise.BIT_IDENTICAL, 8),
        (LosslessMode.ALWAYS, (1,), 9.0, 1.0, Promise.REPLAYED, 1),
        (LosslessMode.TIES, (1, 2, 4), 0.0, 1.0, Promise.TIES, 1),
    ],
)
def test_the_cheapest_way_that_the_mode_allows_is_taken(
    mode: LosslessMode,
    widths: tuple[int, ...],
    margin: float,
    cost: float,
    promise: Promise,
    plain_width: int,
) -> None:
    kept = keep_promise(mode, BatchInvariance(margin, widths, plain_cost=cost))
    assert (kept.promise, kept.plain_width) == (promise, plain_width)


@pytest.mark.parametrize(
    ("mode", "widths", "promise"),
    [
        (LosslessMode.AUTO, (4, 8), Promise.BIT_IDENTICAL),
        (LosslessMode.AUTO, (1,), Promise.TIES),
        (LosslessMode.ALWAYS, (1,), Promise.REPLAYED),
    ],
)
def test_near_ties_are_not_known_where_the_noise_is_not(
    mode: LosslessMode, widths: tuple[int, ...], promise: Promise
) -> None:
    found = BatchInvariance(3e-6, widths, noise_is_known=False, plain_cost=3.0)
    assert keep_promise(mode, found).promise is promise


@pytest.mark.parametrize(
    ("rounds_activations", "noise", "is_known"),
    [(True, 1e-6, False), (True, 0.1, True), (False, 1e-6, True)],
)
def test_noise_is_known_once_an_activation_was_rounded_the_other_way(
    rounds_activations: bool, noise: float, is_known: bool
) -> None:
    model = StepsOffModel(2, FLAT)
    model.noise = noise
    model.capabilities = replace(model.capabilities, rounds_activations=rounds_activations)
    assert measure_batch_invariance(model).noise_is_known is is_known
