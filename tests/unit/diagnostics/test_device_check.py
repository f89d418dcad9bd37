"""What `edge-spec doctor --run` makes of what it has measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.device_check.memory import judge_taken
from edge_spec.diagnostics.device_check.sessions import judge_clock
from edge_spec.diagnostics.device_check.soak import judge_growth
from edge_spec.diagnostics.doctor.document import Privacy
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

MB = 1_000_000
PASS_S, TOKEN_S, COMMIT_S = 0.01, 0.001, 0.0005


class DeviceTime:
    """A clock that a device moves; late: what it has been asked and not done yet."""

    def __init__(self) -> None:
        self.now = self.late = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float, is_late: bool) -> None:
        if is_late:
            self.late += seconds
            return
        self.now += seconds + self.late
        self.late = 0.0


class TimedSession(ScriptedSession):
    """Returns from the calls that are named before the device has done them."""

    def __init__(self, model: ScriptedModel, time: DeviceTime, late: Sequence[str]) -> None:
        super().__init__(model)
        self._time, self._late = time, late

    def prefill(self, tokens: Sequence[int]) -> None:
        super().prefill(tokens)
        self._time.spend(TOKEN_S * len(tokens), "prefill" in self._late)

    def forward(self, tree: TokenTree) -> Forward:
        self._time.spend(PASS_S, "forward" in self._late)
        return super().forward(tree)

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self._time.spend(COMMIT_S, is_late=False)


class TimedModel(ScriptedModel):
    def __init__(self, time: DeviceTime, late: Sequence[str]) -> None:
        super().__init__(random_logits(9), 9)
        self._time, self._late = time, late

    def open_session(self) -> ScriptedSession:
        return TimedSession(self, self._time, self._late)


@pytest.mark.parametrize(
    ("late", "expected"),
    [((), ["ok", "ok"]), (("forward",), ["fault", "ok"]), (("prefill",), ["ok", "fault"])],
)
def test_a_clock_that_is_read_before_the_device_is_done_is_found(
    late: Sequence[str], expected: list[str]
) -> None:
    time = DeviceTime()
    assert [row.level for row in judge_clock(TimedModel(time, late), time)] == expected


@pytest.mark.parametrize(
    ("taken", "forecast", "level"),
    [
        (1000 * MB, 1000 * MB, "ok"),
        (900 * MB, 1000 * MB, "ok"),
        (2000 * MB, 1000 * MB, "fault"),
        (None, MB, "note"),
        (2, None, "note"),
    ],
)
def test_memory_beyond_its_forecast(taken: int | None, forecast: int | None, level: str) -> None:
    assert judge_taken("main memory", taken, forecast, 9).level == level


def test_memory_that_grows_slowly_is_found_and_a_warm_up_is_not() -> None:
    assert judge_growth([1] * 9).level == "note"
    assert judge_growth([min(500, 20 * i) * MB for i in range(60)]).level == "ok"
    assert judge_growth([(500 + i) * MB for i in range(60)]).level == "fault"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/usr/lib/x86_64/libcuda.so.1: cannot open", "\u2026/libcuda.so.1: cannot open"),
        (r"C:\Users\me\lib.dll is missing", "\u2026/lib.dll is missing"),
        ("read and/or write 3/4 of it", "read and/or write 3/4 of it"),
    ],
)
def test_paths_keep_their_last_part_alone(said: str, told: str) -> None:
    assert Privacy(["/models/tiny.gguf"]).text(said) == told


def test_a_models_own_directory_goes_even_with_spaces(tmp_path: Path) -> None:
    place = tmp_path / "Jo's models"
    assert Privacy([str(place / "a.gguf")]).text(f"{place}/a.gguf") == "\u2026/a.gguf"
