"""However decoding ends, the cache holds the prompt and what was told, short of the last token."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.results import DecodedToken
from edge_spec.errors import SessionError
from edge_spec.scheduler.policy import FixedPolicy
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


def fail_in_forward(session: Any, at: int) -> None:
    """Raises in the `at`-th pass."""
    forward, left = session.forward, iter(range(at - 1))

    def failing(tree: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("broken")
        return forward(tree)

    session.forward = failing


ENDS: dict[str, type[BaseException] | None] = {
    "interrupt in observe": KeyboardInterrupt,
    "error in observe": RuntimeError,
    "error in forward": SessionError,
    "interrupt while a round is reported": KeyboardInterrupt,
    "closed": None,
}


@pytest.mark.parametrize("num_rounds", [0, 1, 2])
@pytest.mark.parametrize("how", ENDS)
def test_the_cache_is_left_as_told(how: str, num_rounds: int) -> None:
    """num_rounds: that were told before the end."""
    reported: list[Any] = []
    error, at = ENDS[how], num_rounds + 1

    def report(stats: Any) -> None:
        reported.append(stats)
        if how == "interrupt while a round is reported" and len(reported) == at:
            raise KeyboardInterrupt

    fails = error if how.endswith("in observe") else None
    drafter = Failing(fails("broken"), at) if fails else SuffixDrafter()
    session, rounds = start(ScriptedModel(random_logits(3, order=1), 3), drafter, report)
    if how == "error in forward":
        fail_in_forward(session, at)
    told: list[DecodedToken] = []
    for _ in range(num_rounds):
        told += next(rounds)
    if error is None:
        rounds.close()
    else:
        with pytest.raises(error, match=None if error is KeyboardInterrupt else "broken"):
            next(rounds)
    assert told_only(session, told) and bool(told) == (num_rounds > 0)
