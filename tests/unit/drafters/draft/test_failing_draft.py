"""A draft that dies in the middle of a text: the text goes on as if there had been none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import GuardedDrafter
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.scheduler.adaptive import PolicyStage
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits
from fixtures.axes import each, pairwise

VOCAB = 12
PROMPT = [1, 2, 0, 1]
NEXT = random_logits(VOCAB, order=2, scale=6.0)
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, seed=3)

Spoil = Callable[[np.ndarray], np.ndarray]


class FailingSession(ScriptedSession):
    """Goes wrong at the `after`-th call of one method, and from then on."""

    def __init__(self, model: ScriptedModel, where: str, after: int, spoil: Spoil | None) -> None:
        super().__init__(model)
        self._where, self._after, self._spoil = where, after, spoil
        self.calls = 0

    def _failing(self, where: str) -> bool:
        self.calls += where == self._where
        failing = where == self._where and self.calls > self._after
        if failing and self._spoil is None:
            raise RuntimeError("the device\nwas lost")
        return failing

    def prefill(self, tokens: Sequence[int]) -> None:
        self._failing("prefill")
        super().prefill(tokens)

    def forward(self, tree: TokenTree) -> Forward:
        out = super().forward(tree)
        if self._failing("forward") and self._spoil is not None:
            return Forward(self._spoil(out.logits))
        return out

    def commit(self, rows: Sequence[int]) -> None:
        self._failing("commit")
        super().commit(rows)

    def rollback(self, length: int) -> None:
        self._failing("rollback")
        super().rollback(length)


def one_nan(logits: np.ndarray) -> np.ndarray:
    logits[:, 4] = np.nan
    return logits


SPOILS: dict[str, Spoil] = {
    "NaN": lambda logits: logits * np.nan,
    "one NaN": one_nan,
    "infinite": lambda logits: logits + np.inf,
    "nothing possible": lambda logits: logits - np.inf,
    "no rows": lambda logits: logits[:0],
    "one dimension": lambda logits: logits[0],
    "three dimensions": lambda logits: logits[None],
    "no tokens": lambda logits: logits[:, :0],
}


def failing(
    where: str, after: int, spoil: Spoil | None = None, below: bool = False
) -> GuardedDrafter:
    model = ScriptedModel(NEXT, VOCAB)
    session = FailingSession(model, where, after, spoil)
    drafter = DraftModelDrafter(model, session, VOCAB)
    if below:
        policy = FixedPolicy(branches=False)
        level = PolicyStage([drafter, SuffixDrafter()], policy, 64)
        drafter = DraftModelDrafter(model, model.open_session(), VOCAB, level)
    return GuardedDrafter(drafter, VOCAB)


def held_to_plain(
    guarded: GuardedDrafter, params: SamplingParams, policy: Any, decode: Any, caplog: Any
) -> list[Any]:
    """Checks two texts in a row, and returns the rounds of the first."""
    model = ScriptedModel(NEXT, VOCAB)
    plain = decode(model, PROMPT, params=params, max_tokens=40)
    with caplog.at_level(logging.WARNING, "edge_spec"):
        runs = [
            decode(model, PROMPT, [guarded], params=params, max_tokens=40, policy=policy)
            for _ in range(2)
        ]
    assert [run.tokens for run in runs] == [plain.tokens] * 2
    assert guarded.fault == "RuntimeError: its session cannot be opened again"
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert not any(stats.num_draft_tokens for stats in runs[1].rounds)
    return list(runs[0].rounds)


@pytest.mark.parametrize(
    ("where", "after", "branches", "params"),
    pairwise(["forward", "commit", "rollback"], [2, 7], [False, True], [GREEDY, SEEDED]),
)
def test_a_draft_that_dies_is_dropped_once_and_for_all(
    where: str, after: int, branches: bool, params: SamplingParams, decode: Any, caplog: Any
) -> None:
    guarded = failing(where, after)
    policy = FixedPolicy(max_draft_tokens=4, branches=branches)
    rounds = held_to_plain(guarded, params, policy, decode, caplog)
    assert "(RuntimeError: the device was lost)" in caplog.records[0].getMessage()
    if after == 7:
        assert sum(stats.num_accepted for stats in rounds) > 0  # it was of use before


@pytest.mark.parametrize(
    ("spoil", "branches", "params"),
    each(list(SPOILS), [False, True], [GREEDY, GREEDY, SEEDED, SEEDED]),
)
def test_logits_that_are_none_are_not_drafted_from(
    spoil: str, branches: bool, params: SamplingParams, decode: Any, caplog: Any
) -> None:
    guarded = failing("forward", 5, SPOILS[spoil])
    policy = FixedPolicy(max_draft_tokens=4, branches=branches)
    rounds = held_to_plain(guarded, params, policy, decode, caplog)
    assert sum(stats.num_accepted for stats in rounds) > 0


@pytest.mark.parametrize(("spoil", "shape"), each([None, *SPOILS], [(), (-1, 0, 0, 1)]))
def test_a_draft_that_samples_and_dies_leaves_a_whole_text(
    spoil: str | None, shape: tuple[int, ...]
) -> None:
    """Rounds before its death were drawn with its help; those after it are plain."""
    guarded = failing("forward", 8, SPOILS[spoil] if spoil else None)

    class Shaped(FixedPolicy):
        def choose(self, drafters: Any, pending: int, budget: Budget) -> Any:
            shaped = Budget(min(3, budget.num_draft_tokens), budget.num_rows, shape=shape)

            class Asking:
                def propose(self, pending: int, budget: Budget) -> TokenTree:
                    return guarded.propose(pending, shaped)

            return super().choose([Asking()], pending, budget)

    model = ScriptedModel(NEXT, VOCAB)
    session = model.open_session()
    session.prefill(PROMPT[:-1])
    rounds: list[Any] = []
    decoder = Decoder(session, [guarded], Shaped(min_confidence=0.0))
    sampler = Sampler(SEEDED, PROMPT, sampled_drafts=True)
    decoded = decoder.decode(
        PROMPT, sampler, GenerationLimits(40, frozenset(), 512, 64), rounds.append
    )
    text = [token.id for tokens in decoded for token in tokens]
    assert len(text) == 40 and session.committed == [*PROMPT, *text][:-1]
    assert guarded.fault
    drafted = [stats.num_draft_tokens > 0 for stats in rounds]
    assert any(drafted) and drafted == sorted(drafted, reverse=True)


def test_a_level_that_died_is_opened_again_with_the_draft_above_it(decode: Any) -> None:
    model = ScriptedModel(NEXT, VOCAB)
    dying = FailingSession(model, "forward", 2, None)
    lower = DraftModelDrafter(model, dying, VOCAB, reopened=model.open_session)
    level = PolicyStage([lower], FixedPolicy(branches=False), 64)
    upper = DraftModelDrafter(
        model, model.open_session(), VOCAB, level, reopened=model.open_session
    )
    guarded = GuardedDrafter(upper, VOCAB)
    policy = FixedPolicy(branches=False)
    first, second = (
        decode(model, PROMPT, [guarded], max_tokens=20, policy=policy) for _ in range(2)
    )
    assert first.tokens == second.tokens == decode(model, PROMPT, max_tokens=20).tokens
    assert guarded.fault is None and dying.calls == 3
    assert any(stats.num_accepted for stats in second.rounds)
