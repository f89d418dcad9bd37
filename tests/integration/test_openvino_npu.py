"""The NPU of the runtime openvino, through NPUW on the processor: sessions, pairs, what was
compiled and kept, and an NPU that is not there, too small or gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino")

from edge_spec import load
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
)
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.openvino import OpenVinoRuntime
from edge_spec.runtimes.openvino.model import OpenVinoGraphs
from fixtures import npu_stand_in

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
    npu_stand_in.put_in_place(monkeypatch)


def refused(error: type[EdgeSpecError], call: Callable[[], Any], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def opened(bundle: Bundle) -> Any:
    return OpenVinoRuntime().open(bundle, NPU)


def entry_of(cache: Path) -> Path:
    (found,) = cache.glob("compiled/*-openvino-npu/entry.json")
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


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third request of every session raises what OpenVINO raises."""
    run, calls = OpenVinoGraphs.run, [0]

    class Gone:
        def __init__(self, compiled: Any) -> None:
            pass

        def run(self, inputs: Any) -> Any:
            raise RuntimeError(
                "Exception from src/x.cpp:1:\nL0 failed: ZE_RESULT_ERROR_DEVICE_LOST"
            )

    def counted(self: OpenVinoGraphs, function: str, inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            self._requests[function] = Gone(None)  # type: ignore[assignment]
        return run(self, function, inputs)

    monkeypatch.setattr(OpenVinoGraphs, "run", counted)


def test_an_npu_that_is_gone_is_one_line_for_a_target(bundle: Bundle, request: Any) -> None:
    session = opened(bundle).open_session()
    request.getfixturevalue("vanishing")
    session.prefill([1, 2])
    session.prefill([3])
    refused(DeviceError, lambda: session.prefill([4]), "npu failed to run rows_1: L0 failed")
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
    assert "npu failed to run" in caplog.text
