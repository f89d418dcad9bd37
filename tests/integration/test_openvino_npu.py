"""The NPU of the runtime openvino, through NPUW on the processor: sessions, pairs, what was
compiled and kept, and an NPU that is not there, too small or gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino")

from edge_spec import load
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
from edge_spec.errors import (
    DeviceError,
    DeviceMemoryError,
    EdgeSpecError,
    UsageError,
)
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.fitting.devices import Device, processor
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.planner import Planner
from edge_spec.runtimes.openvino import OpenVinoRuntime, npu_device
from edge_spec.runtimes.openvino.npu_device import STAND_IN_VARIABLE, find_npu
from edge_spec.runtimes.openvino.npu_model import NpuGraphs, open_for_npu
from fixtures.trials import as_forecast

CONTEXT = 40
NPU = RuntimeOptions(providers=("npu",))


@pytest.fixture(scope="module")
def bundle(checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("npu") / "bundle"
    options = ExportOptions("fp16", context_length=CONTEXT, check=False)
    StaticOnnxExporter().export(checkpoint("llama"), out, options, lambda what, fraction: None)
    return open_bundle(out)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def stand_in(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(cache))
    monkeypatch.setenv(STAND_IN_VARIABLE, "cpu")


def refused(error: type[EdgeSpecError], call: Callable[[], Any], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def opened(bundle: Bundle) -> Any:
    return OpenVinoRuntime().open(bundle, NPU)


def entry_of(cache: Path) -> Path:
    (found,) = cache.glob("compiled/*-openvino-npu-cpu/entry.json")
    return found


def answer(target: str, **options: Any) -> Any:
    with load(target, runtime="ort", exact=True, threads=1, **options) as llm:
        return llm.generate("the", max_tokens=60)


def ids(result: Any) -> list[int]:
    return [token.id for token in result.tokens]


@pytest.mark.usefixtures("fixed_policy")
def test_a_draft_there_changes_no_text_drafts_alike_and_is_left_when_its_slots_are_full(
    hf: Callable[..., Path], bundle: Bundle
) -> None:
    """The answer is longer than the draft's context. Float16 rounding of two libraries may turn a
    single draft token, not a tenth of them."""
    draft = {"draft": str(bundle.path), "drafter": "draft-model"}
    plain = answer(str(hf()), draft="none", drafter="none")
    there = answer(str(hf()), draft_runtime="openvino", draft_device="npu", **draft)
    on_cpu = answer(str(hf()), draft_runtime="ort", **draft)
    assert len(ids(plain)) > CONTEXT
    assert ids(there) == ids(on_cpu) == ids(plain)
    accepted, alike = (
        result.stats.drafters["draft-model"].draft_n_accepted for result in (there, on_cpu)
    )
    assert accepted > 0 and abs(accepted - alike) <= max(1, alike // 10)


def test_what_was_compiled_is_read_again(
    bundle: Bundle, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(bundle)
    before = entry_of(cache).stat().st_mtime_ns
    caplog.clear()
    opened(bundle)
    assert not caplog.records and entry_of(cache).stat().st_mtime_ns == before


@pytest.mark.slow  # beside a damaged entry
def test_what_another_driver_compiled_is_removed_and_told_in_a_line(
    bundle: Bundle, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(bundle)
    caplog.clear()  # it was compiled now, or by another test
    with caplog.at_level(logging.WARNING):
        open_for_npu(bundle, NPU, replace(find_npu(), driver="1.2.3"))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "driver none" in told[0] and "\n" not in told[0]
    assert '"driver": "1.2.3"' in entry_of(cache).read_text()


@pytest.mark.parametrize(
    "damaged", [pytest.param("rows_4.blob", marks=pytest.mark.slow), "entry.json"]
)
def test_a_damaged_entry_is_compiled_again(
    damaged: str, bundle: Bundle, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(bundle)
    path = entry_of(cache).with_name(damaged)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255  # OpenVINO alone would take it
    path.write_bytes(content)
    caplog.clear()
    opened(bundle)
    assert ["damaged" in record.getMessage() for record in caplog.records] == [True, False]
    assert path.read_bytes() != content


def test_more_weights_than_the_npu_maps_are_refused_before_anything_is_compiled(
    bundle: Bundle,
) -> None:
    small = replace(find_npu(), total_bytes=200_000, core=None)
    refused(
        DeviceMemoryError, lambda: open_for_npu(bundle, NPU, small), r"\d MB on the NPU.*map 0 MB"
    )


def test_bundles_go_where_their_shapes_fit(
    bundle: Bundle, exported: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(UsageError, lambda: opened(exported("llama")), "fixed shapes.*--format onnx-static")
    on_cpu = lambda: OpenVinoRuntime().open(bundle, RuntimeOptions())  # noqa: E731
    refused(UsageError, on_cpu, "on the npu only")
    assert "npu" in [device.name for device in OpenVinoRuntime().devices(RuntimeOptions())]
    monkeypatch.setenv(STAND_IN_VARIABLE, "1")
    refused(UsageError, find_npu, "is for tests")
    monkeypatch.delenv(STAND_IN_VARIABLE)
    if "npu" not in [device.name for device in OpenVinoRuntime().devices(RuntimeOptions())]:
        refused(DeviceError, find_npu, "no NPU on this machine")


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third request of every session raises what OpenVINO raises."""
    run, calls = NpuGraphs.run, [0]

    class Gone:
        def __init__(self, compiled: Any) -> None:
            pass

        def run(self, inputs: Any, interruption: Any) -> Any:
            raise RuntimeError(
                "Exception from src/x.cpp:1:\nL0 failed: ZE_RESULT_ERROR_DEVICE_LOST"
            )

    def counted(self: NpuGraphs, function: str, inputs: Any, interruption: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            self._requests[function] = Gone(None)  # type: ignore[assignment]
        return run(self, function, inputs, interruption)

    monkeypatch.setattr(NpuGraphs, "run", counted)


def test_an_npu_that_is_gone_is_one_line_for_a_target(bundle: Bundle, request: Any) -> None:
    session = opened(bundle).open_session()
    request.getfixturevalue("vanishing")
    session.prefill([1, 2])
    session.prefill([3])
    refused(DeviceError, lambda: session.prefill([4]), "the NPU failed to run rows_1: L0 failed")
    assert session.length == 3


@pytest.mark.usefixtures("fixed_policy")
def test_an_answer_goes_on_without_a_draft_whose_npu_is_gone(
    hf: Callable[..., Path], bundle: Bundle, request: Any, caplog: pytest.LogCaptureFixture
) -> None:
    draft = {"draft": str(bundle.path), "draft_runtime": "openvino", "draft_device": "npu"}
    plain = answer(str(hf()), draft="none", drafter="none")
    options: dict[str, Any] = {"runtime": "ort", "exact": True, "threads": 1}
    with load(str(hf()), drafter="draft-model", **draft, **options) as llm:
        request.getfixturevalue("vanishing")  # once it is loaded, and its passes are measured
        there = llm.generate("the", max_tokens=60)
    assert ids(there) == ids(plain)
    assert "the NPU failed to run" in caplog.text


@pytest.mark.usefixtures("fixed_policy")
def test_a_draft_whose_npu_is_gone_before_its_first_pass_does_not_end_the_command(
    hf: Callable[..., Path],
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))  # where no costs are kept
    opened(bundle).close()  # its graphs are compiled and tried
    request.getfixturevalue("vanishing")
    plain = answer(str(hf()), draft="none", drafter="none")
    draft = {"draft": str(bundle.path), "draft_runtime": "openvino", "draft_device": "npu"}
    options: dict[str, Any] = {"runtime": "ort", "exact": True, "threads": 1}
    with load(str(hf()), drafter="draft-model", **draft, **options) as llm:
        there = llm.generate("the", max_tokens=60)
    assert ids(there) == ids(plain)
    assert "the NPU failed to run" in caplog.text


def doctors_faults(model: object, **places: Any) -> list[tuple[str, str]]:
    """The groups and texts of faults; the draft is in `places`."""
    draft = places.pop("draft", None)
    request = DiagnosisRequest(str(model), draft, places=LoadOptions(**places))
    here = [Device("ort", "cpu", "cpu", "the processor")]
    report = diagnose(request, lambda what, fraction: None, lambda: here)
    return [(each.group, each.found) for each in report.findings if each.level == "fault"]


def test_doctor_knows_whether_a_draft_can_be_on_the_npu(
    hf: Callable[..., Path], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = hf()
    draft = {"draft": str(bundle.path), "draft_runtime": "openvino"}
    assert doctors_faults(target, draft_device="npu", runtime="reference", **draft) == []
    on_cpu = lambda: OpenVinoRuntime().memory(bundle, RuntimeOptions())  # noqa: E731
    refused(UsageError, on_cpu, "on the npu only")  # by its forecast, which doctor asks for
    monkeypatch.delenv(STAND_IN_VARIABLE)
    monkeypatch.setattr(npu_device, "_own", lambda: None)
    ((group, found),) = doctors_faults(target, draft_device="npu", **draft)
    assert (group, found) == ("draft", "openvino finds no NPU on this machine")


@pytest.mark.slow  # beside test_planning.py
def test_a_plan_puts_models_on_the_npu_in_the_form_that_it_takes(
    hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is converted for each of the two devices, and pairs across them are measured."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    here = [processor("ort"), Device("openvino", "npu", "npu", "in its place")]
    source = Source(str(hf()), lambda what, fraction: None)
    planner = Planner(source, source, here, lambda what, fraction: None, as_forecast)
    plan = planner.make()
    places = {
        (each.target.device, each.draft.device)
        for each in plan.placements
        if each.draft is not None and each.tokens_per_s is not None
    }
    assert {("cpu", "npu"), ("npu", "cpu")} <= places
    across = [each for each in plan.placements if each.draft and each.draft.device == "npu"]
    assert all(each.target.weights and each.acceptance is not None for each in across)
    assert not [note for note in planner.notes if "fixed shapes" in note]


def test_the_forecast_counts_the_weights_of_each_function(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = bundle.manifest.files["model.onnx.data"].num_bytes
    functions = sum(name.endswith(".onnx") for name in bundle.manifest.files)
    beside_tests = OpenVinoRuntime().memory(bundle, NPU)
    assert beside_tests.weights >= functions * weights  # the processor has copies of float32
    assert not beside_tests.on_devices
    monkeypatch.delenv(STAND_IN_VARIABLE)
    found = OpenVinoRuntime().memory(bundle, NPU)
    assert found.weights == 0 and found.on_devices["npu"] >= functions * weights
    # All slots are there from the beginning.
    assert found == OpenVinoRuntime().memory(bundle, NPU, 3)
