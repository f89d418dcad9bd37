"""What `edge-spec accept` makes of what it has measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline, OutOfTimeError, TimedModel
from edge_spec.diagnostics.accept.forecast import judge_rate
from edge_spec.diagnostics.accept.lossless import extent_for
from edge_spec.diagnostics.accept.memory import judge_devices, judge_growth, judge_resident
from edge_spec.diagnostics.accept.passes import judge_rounds, measure_rounds
from edge_spec.diagnostics.accept.privacy import Privacy
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, Mark
from edge_spec.diagnostics.accept.runner import AcceptRun, with_runtime
from edge_spec.diagnostics.accept.soak import judge_memory
from edge_spec.fitting.devices import Device
from edge_spec.fitting.memory import Memory
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

MB = 1_000_000
PASS_S, TOKEN_S, COMMIT_S = 0.01, 0.001, 0.0005


class Time:
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

    def __init__(self, model: ScriptedModel, time: Time, late: Sequence[str]) -> None:
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


class TimedScripted(ScriptedModel):
    def __init__(self, time: Time, late: Sequence[str]) -> None:
        super().__init__(random_logits(9), 9)
        self._time, self._late = time, late

    def open_session(self) -> ScriptedSession:
        return TimedSession(self, self._time, self._late)


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ((), ["passed", "passed"]),
        (("forward",), ["failed", "passed"]),
        (("prefill",), ["passed", "failed"]),
    ],
)
def test_a_clock_that_is_read_before_the_device_is_done_is_found(
    late: Sequence[str], expected: list[str]
) -> None:
    time = Time()
    rows = list(judge_rounds(measure_rounds(TimedScripted(time, late), time)))
    assert [row.mark for row in rows] == expected
    assert not late or any("before the device is done" in row.found for row in rows)


def test_a_slow_check_ends_by_itself() -> None:
    time = Time()
    session = TimedModel(TimedScripted(time, ()), Deadline(0.05, time)).open_session()
    with pytest.raises(OutOfTimeError):
        for _ in range(10):
            session.forward(TokenTree.chain(1))
    assert time.now < 0.05 + 2 * PASS_S


@pytest.mark.parametrize(
    ("forecast", "real", "mark"),
    [
        (100.0, 100.0, "passed"),
        (100.0, 50.0, "failed"),
        (50.0, 100.0, "failed"),
        (None, 9.0, "not measured"),
    ],
)
def test_a_plan_that_forecasts_half_or_twice_the_rate_is_wrong(
    forecast: float | None, real: float, mark: str
) -> None:
    assert judge_rate("suffix", forecast, real).mark == mark


@pytest.mark.parametrize(("real", "mark"), [(1000, "passed"), (900, "passed"), (2000, "failed")])
def test_memory_beyond_its_forecast(real: int, mark: str) -> None:
    told = Memory(800 * MB, 100 * MB, 100 * MB, on_devices={"cuda0": 1000 * MB})
    assert judge_resident(5 * MB, (5 + real) * MB, told, 9).mark == mark
    (row,) = judge_devices({"cuda0": 5000 * MB}, {"cuda0": (5000 - real) * MB}, told, 9)
    assert row.mark == mark
    least = Memory(0, 0, 0)
    assert judge_growth(5 * MB, (5 + real) * MB, told, least, 9).mark == mark


def test_what_is_not_told_is_not_measured() -> None:
    assert judge_resident(None, 3, Memory(1, 1, 1), 9).mark == "not measured"
    assert judge_resident(1, 3, None, 9).mark == "not measured"
    assert [row.mark for row in judge_devices({}, {}, None, 9)] == ["not measured"]
    assert judge_memory("memory", [1] * 9).mark == "not measured"


def test_memory_that_grows_slowly_is_found_and_a_warm_up_is_not() -> None:
    warm_up = [min(500, 20 * i) * MB for i in range(60)]
    assert judge_memory("memory", warm_up).mark == "passed"
    assert judge_memory("memory", [(500 + i) * MB for i in range(60)]).mark == "failed"
    assert judge_memory("device", [-(900 - i) * MB for i in range(60)]).mark == "failed"


def test_verification_is_as_large_as_the_time_allows() -> None:
    fast, slow = extent_for(60, 0.001), extent_for(60, 0.5)
    assert (fast.num_prompts, fast.num_draws) == (20, 1500)
    assert (slow.num_prompts, slow.num_draws) == (2, 0)


def device(runtime: str, name: str | None, fault: str | None = None) -> Device:
    return Device(runtime, name, "gpu", "", fault=fault, free_bytes=1, total_bytes=2)


@pytest.mark.parametrize(
    ("devices", "runtime"),
    [
        ([device("llamacpp", "vulkan0"), device("ort", "cpu")], "llamacpp"),
        ([device("ort", "vulkan0", "no driver"), device("ik", "vulkan0")], "ik"),
        ([device("ort", "vulkan0"), device("llamacpp", "vulkan0")], "ort"),
        ([device("reference", "vulkan0"), device("ort", "cpu")], "reference"),
    ],
)
def test_auto_is_a_runtime_that_has_the_device(devices: list[Device], runtime: str) -> None:
    found = with_runtime(AcceptRequest("model", "Vulkan0"), devices)
    assert found.runtime == runtime and found.told_memory


def test_what_a_slow_device_has_no_time_for_is_not_begun() -> None:
    """Or it would be ended in the middle, and taken for one that hangs."""

    def isolate(work: object, name: str, *rest: str, timeout_s: float) -> list[dict[str, object]]:
        return [CheckRow(name, "opens", Mark.PASSED, "", {"step_ms": 5000}).to_dict()]

    run = AcceptRun(
        AcceptRequest("model", "slow", "ort"),
        60,
        lambda what, fraction: None,
        lambda: None,
        isolate=isolate,
    )
    run.run([])
    refused = {row.check for row in run.rows if "it would take" in row.found}
    assert refused == {"verify", "forecast", "soak"}


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
