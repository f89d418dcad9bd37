"""How long a pass waits for conversations that are likely to come."""

from __future__ import annotations

import pytest

from edge_spec.core.model import Session
from edge_spec.engine.sharing_times import Returns
from edge_spec.testing import ScriptedModel, random_logits

PASS_S = 8e-3


def session() -> Session:
    return ScriptedModel(random_logits(10), 10).open_session()


@pytest.mark.parametrize("gap_s, waits_s", [(1e-3, 3e-3), (9e-3, 0.0)])
def test_who_comes_soon_after_each_pass_is_waited_for(gap_s: float, waits_s: float) -> None:
    """At most half as long as a pass takes, and only until then."""
    returns, other, now = Returns(), session(), 0.0
    for _ in range(3):
        returns.arrived(other, now)
        returns.observe(PASS_S)
        now += PASS_S
        returns.left(other, now)
        now += gap_s
    returns.arrived(other, now)
    assert returns.wait_s(now) == 0  # it is here
    returns.left(other, now)
    assert returns.wait_s(now + 1e-3) == pytest.approx(waits_s)
    assert returns.wait_s(now + 5e-3) == pytest.approx(0, abs=1e-12)  # it has not come
