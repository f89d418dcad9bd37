"""A training's file brings back all of it, or says that it is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_spec.distill.tensor_file import read_tensors, write_tensors
from edge_spec.distill.training_state import Evaluation, TrainingState, load_state, save_state


def _state() -> TrainingState:
    state = TrainingState(step=7, losses=[0.5, 0.25])
    state.set_group("best", {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)})
    state.set_group("optimizer/a.weight", {"step": np.array(7, np.float32)})
    state.history.append(Evaluation(3, 1.5, (0.5, 0.25), 1, 1.1))
    state.history.append(Evaluation(6, 1.0, (0.6, 0.25), 2, 1.05))
    return state


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    save_state(tmp_path / "state", _state())
    found = load_state(tmp_path / "state")
    assert found is not None
    assert (found.step, found.losses, found.history) == (7, [0.5, 0.25], _state().history)
    np.testing.assert_array_equal(found.group("best")["a.weight"], [[0, 1, 2], [3, 4, 5]])
    assert found.group("optimizer/a.weight")["step"].shape == ()
    assert found.best == found.history[0]  # by its forecast, not by its loss


@pytest.mark.parametrize("count", [0, 3, 7, 9, 40, 200, 300, -1, -4])
def test_what_is_cut_off_is_damaged(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_state(tmp_path / "state", _state())
    whole = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(whole[:count])
    assert load_state(tmp_path / "state") is None
    assert "training begins again" in caplog.text


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}']
)
def test_another_header_is_damaged(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="header"):
        read_tensors(tmp_path / "state")


def test_nothing_is_there_before_the_first_time(tmp_path: Path) -> None:
    assert load_state(tmp_path / "state") is None


def test_tensors_are_those_of_the_format(tmp_path: Path) -> None:
    values = {"x": np.array([[1, 2]], np.int64), "y": np.array([True, False])}
    write_tensors(tmp_path / "file", values, "a note")
    found, note = read_tensors(tmp_path / "file")
    assert note == "a note" and found.keys() == values.keys()
    for name, each in values.items():
        np.testing.assert_array_equal(found[name], each)
