"""A GPU is trained on where PyTorch has one, and its lack of memory is one line."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from edge_spec.distill.training_device import training_device  # noqa: E402
from edge_spec.errors import DeviceMemoryError  # noqa: E402


def test_tensors_are_made_on_the_device_that_is_there() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    with training_device():
        assert torch.zeros(1).device.type == expected
        assert torch.as_tensor([1.0]).device.type == expected
    assert torch.zeros(1).device.type == "cpu"


def test_too_little_memory_says_how_to_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with (
        pytest.raises(DeviceMemoryError, match="a GPU has too little memory") as caught,
        training_device(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
