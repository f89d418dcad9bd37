"""A pass is ended by another thread only while it runs."""

from __future__ import annotations

import pytest

from edge_spec.errors import SessionError
from edge_spec.runtimes.static.interruption import Interruption


def test_a_pass_is_ended_while_it_runs_and_no_other_one_begins() -> None:
    interruption, ended = Interruption(), []
    with interruption.ended_by(lambda: ended.append("first")):
        pass
    interruption.require_none()
    with interruption.ended_by(lambda: ended.append("second")):
        interruption.ask()
    assert ended == ["second"]
    with pytest.raises(SessionError), interruption.ended_by(lambda: ended.append("third")):
        ended.append("its block")
    assert ended == ["second"]


def test_a_pass_that_has_ended_is_not_ended_again() -> None:
    """Its engine may run a pass of another session by then."""
    interruption, ended = Interruption(), []
    with pytest.raises(ValueError), interruption.ended_by(lambda: ended.append("it")):
        raise ValueError("failed by itself")
    interruption.ask()
    assert not ended
