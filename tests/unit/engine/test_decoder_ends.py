"""However decoding ends, the cache holds the prompt and what was told, short of the last token."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.control.policy import FixedPolicy
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.token_origin import DecodedToken
from edge_spec.errors import SessionError
from edge_spec.testing import ScriptedModel, random_logits

PROMPT = [1, 2, 0, 1]


class Failing(SuffixDrafter):
    """Raises in the observe of its `at`-th round."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__()
        self.error, self.left = error, at

    def observe(self, *outcome: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        super().observe(*outcome)


def start(model: ScriptedModel, drafter: Any, on_round: Any = lambda stats: None) -> Any:
    session = model.open_session()
    session.prefill(PROMPT[:-1])
    rounds = Decoder(session, [drafter], FixedPolicy(min_confidence=0)).decode(
        PROMPT,
        Sampler(SamplingParams(), PROMPT),
        GenerationLimits(30, frozenset(), 512, 64),
        on_round,
    )
    return session, rounds


def told_only(session: Any, told: list[DecodedToken]) -> bool:
    """Whether the cache holds the prompt and the told tokens, short of the pending one."""
    return bool(session.committed == [*PROMPT, *(token.id for token in told)][:-1])


@pytest.mark.parametrize("rounds_before", [0, 1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
def test_an_error_in_observe_leaves_the_cache_as_told(
    rounds_before: int, error: BaseException
) -> None:
    model, told = ScriptedModel(random_logits(3, order=1), 3), []
    drafter = Failing(error, at=rounds_before + 1)
    session, rounds = start(model, drafter)
    with pytest.raises(type(error)):
        for tokens in rounds:
            told += tokens
    assert told_only(session, told) and (rounds_before == 0) == (not told)


@pytest.mark.parametrize("rounds_before", [0, 1, 2])
def test_an_error_in_forward_leaves_the_cache_as_told(rounds_before: int) -> None:
    model, told = ScriptedModel(random_logits(3, order=1), 3), []
    session, rounds = start(model, SuffixDrafter())
    forward, left = session.forward, iter(range(rounds_before))

    def failing(tree: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("broken")
        return forward(tree)

    session.forward = failing
    with pytest.raises(SessionError, match="RuntimeError: broken"):
        for tokens in rounds:
            told += tokens
    assert told_only(session, told)


def test_an_interrupt_while_a_round_is_reported_leaves_the_cache_as_told() -> None:
    def interrupt(stats: Any) -> None:
        raise KeyboardInterrupt

    session, rounds = start(ScriptedModel(random_logits(3), 3), SuffixDrafter(), interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(rounds)
    assert told_only(session, [])


@pytest.mark.parametrize("num_rounds", [0, 1, 3])
def test_closing_the_iterator_leaves_the_cache_as_told(num_rounds: int) -> None:
    told: list[DecodedToken] = []
    model = ScriptedModel(random_logits(3, order=1), 3)
    session, rounds = start(model, SuffixDrafter())
    for _ in range(num_rounds):
        told += next(rounds)
    rounds.close()
    assert told_only(session, told)
