"""Whether a device computes a model as the CPU does, and what of it the CPU computes instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, SessionError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort import OrtRuntime, devices, graph_loader
from edge_spec.runtimes.ort.devices import PROCESSOR
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.runtimes.static import trial

onnxruntime: Any = pytest.importorskip("onnxruntime")
Exported = Callable[..., Bundle]


def test_scores_of_another_model_are_refused_and_those_of_a_coarser_one_taken(
    exported: Exported,
) -> None:
    whole = trial.scores(OrtRuntime().open(exported("llama", "fp32"), RuntimeOptions()))
    coarse = trial.scores(OrtRuntime().open(exported("llama", "int8"), RuntimeOptions()))
    trial.require_same(whole, whole, "odd")
    trial.require_same(coarse, whole, "odd")
    overflown = whole.copy()
    overflown[0, 0] = np.inf
    for wrong in (np.roll(whole, 1, axis=1), whole * 0, whole * np.nan, whole[::-1], overflown):
        with pytest.raises(DeviceError, match="odd computes this model wrong"):
            trial.require_same(wrong, whole, "odd")


def pretend(monkeypatch: pytest.MonkeyPatch, name: str = "odd", kind: str = "gpu") -> None:
    """Let a device be the CPU under another name."""
    names = {name: PROCESSOR._replace(name=name, kind=kind), "cpu": PROCESSOR}
    monkeypatch.setattr(devices, "choose", lambda library, wanted: names[(*wanted, "cpu")[0]])


@pytest.mark.parametrize("context_length", [None, 4, 7])
def test_a_model_is_tried_on_another_device_before_it_is_used(
    context_length: int | None, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU under another name, first right, then wrong in both forms."""
    pretend(monkeypatch)
    monkeypatch.setattr(graph_loader, "require_on_device", lambda session, device: None)
    options = RuntimeOptions(providers=("odd",), context_length=context_length)
    OrtRuntime().open(exported(), options).close()
    right, calls = trial.scores, []

    def scores(opened: Any) -> np.ndarray:
        calls.append(opened)
        found = right(opened)
        return found if len(calls) == 1 else -found

    monkeypatch.setattr(trial, "scores", scores)
    with pytest.raises(DeviceError, match="odd computes this model wrong"):
        OrtRuntime().open(exported(), options)
    OrtRuntime().open(exported(), RuntimeOptions(context_length=context_length)).close()
    assert len(calls) == 3  # the CPU is not compared with itself


def test_a_model_whose_operators_stay_on_the_cpu_is_refused(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that takes nothing: what runs, and what tells it, is onnxruntime on the CPU."""
    pretend(monkeypatch)
    refused = {
        "int4": "2 GroupQueryAttention, 9 MatMulNBits",
        "fp32": "1 Gemm, 2 GroupQueryAttention, 8 MatMul",
    }
    for kind, heavy in refused.items():
        with pytest.raises(DeviceError, match=f"{heavy} of .*on the CPU, not on odd") as caught:
            OrtRuntime().open(exported("llama", kind), RuntimeOptions(providers=("odd",)))
        assert caught.value.remedy == "Choose another --device or --runtime."


def test_an_npu_takes_only_what_was_compiled_for_it(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "qnn", "npu")
    with pytest.raises(UsageError, match=r"which qnn does not run.*--format qnn") as caught:
        OrtRuntime().open(exported(), RuntimeOptions(providers=("qnn",)))
    assert "\n" not in str(caught.value)


def test_a_trial_that_fails_on_the_cpu_leaves_nothing_open(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, closed = exported(), []
    pretend(monkeypatch)
    monkeypatch.setattr(OrtModel, "close", lambda model: closed.append(model))

    def fails(model: Any) -> np.ndarray:
        raise SessionError("it failed", remedy="Try again.")

    monkeypatch.setattr(trial, "scores", fails)
    with pytest.raises(SessionError, match="it failed"):
        OrtRuntime().open(bundle, RuntimeOptions(providers=("odd",)))
    assert len(closed) == 1
