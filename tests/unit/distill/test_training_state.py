"""A training's file brings back all of it, or says that it is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_spec.drafters.protocol import named, part_of

torch = pytest.importorskip("torch")

from edge_spec.distill.training import (  # noqa: E402
    Evaluation,
    TrainingState,
    load_state,
)


def test_what_is_saved_comes_back_and_what_is_cut_off_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    assert load_state(path) is None and not caplog.text
    state = TrainingState(step=7, losses=[0.5, 0.25])
    state.arrays |= named("best", {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)})
    state.arrays |= named("optimizer/a.weight", {"step": np.array(7, np.float32)})
    state.history.append(Evaluation(3, 1.5, (0.5, 0.25), 1, 1.1))
    state.history.append(Evaluation(6, 1.0, (0.6, 0.25), 2, 1.05))
    state.save(path)
    found = load_state(path)
    assert found is not None
    assert (found.step, found.losses, found.history) == (7, [0.5, 0.25], state.history)
    np.testing.assert_array_equal(part_of(found.arrays, "best")["a.weight"], [[0, 1, 2], [3, 4, 5]])
    assert part_of(found.arrays, "optimizer/a.weight")["step"].shape == ()
    assert found.best == found.history[0]  # by its forecast, not by its loss
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 1
    damaged = [flipped, *(whole[:count] for count in (0, 3, 9, 200, 300, -1, -30))]
    for content in damaged:
        caplog.clear()
        path.write_bytes(content)
        assert load_state(path) is None
        assert "training begins again" in caplog.text
