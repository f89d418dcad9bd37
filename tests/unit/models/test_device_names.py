"""Names of one chip in several libraries: models on it take turns."""

from __future__ import annotations

import pytest

from edge_spec.models.device_names import share_chip
from edge_spec.models.options import LoadOptions


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cpu", "CPU"),
        ("cuda", "cuda0"),
        ("cuda:1", "cuda1"),
        ("openvino-npu", "npu"),
        ("coreml-ane", "ane"),
        ("gpu", "cuda:1"),
        ("openvino-gpu", "gpu"),
        ("rpc0", "rpc0"),
    ],
)
def test_one_chip(one: str, other: str) -> None:
    assert share_chip([one], [other]) and share_chip([other], ["webgpu", one])


@pytest.mark.parametrize(
    ("one", "other"),
    [("cpu", "npu"), ("cuda", "cuda:1"), ("gpu", "npu"), ("gpu", "cpu"), ("vulkan0", "cuda0")],
)
def test_two_chips(one: str, other: str) -> None:
    assert not share_chip([one], [other]) and not share_chip([other], [one])


def test_a_draft_on_its_targets_gpu_under_another_name_is_not_elsewhere() -> None:
    def places(device: str, draft_device: str) -> LoadOptions:
        return LoadOptions(device=device, draft=("small",), draft_device=draft_device)

    assert not places("cuda", "cuda0").drafts_elsewhere
    assert places("cuda", "cpu").drafts_elsewhere
