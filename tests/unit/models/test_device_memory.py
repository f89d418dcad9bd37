"""Whose memory a model's bytes are counted to."""

from __future__ import annotations

import pytest

from edge_spec.models.devices import Device, Memory
from edge_spec.models.memory import DeviceMemories, FreeMemory, Needs


def card(runtime: str, name: str) -> Device:
    return Device(runtime, name, "gpu", "a card", 200, 100)


def on(name: str, num_bytes: int = 60) -> Memory:
    return Memory(10, 0, 0, on_devices={name: num_bytes})


@pytest.mark.parametrize(("name", "is_same"), [("CUDA0", True), ("cuda", True), ("cuda1", False)])
def test_models_on_one_device_are_counted_together(name: str, is_same: bool) -> None:
    memories = DeviceMemories([card("llamacpp", "cuda0"), card("llamacpp", "cuda1")])
    needs = memories.needs([("llamacpp", on("cuda0")), ("llamacpp", on(name))])
    assert needs.on_devices == (
        {"llamacpp cuda0": 120} if is_same else {"llamacpp cuda0": 60, "llamacpp cuda1": 60}
    )
    shortage = FreeMemory(None, memories.free()).shortage(needs)
    assert (shortage is None) is not is_same


def test_a_device_without_memory_of_its_own_takes_the_processors() -> None:
    shared = Device("llamacpp", "vulkan0", "gpu", "integrated", 900, 900, shares_memory=True)
    memories = DeviceMemories([shared])
    needs = memories.needs([("llamacpp", on("vulkan0"))])
    assert needs == Needs(60, {}) and memories.free() == {}


def test_the_processor_s_memory_comes_first_and_all_shortages_name_their_place() -> None:
    free = FreeMemory(1_000_000, {"llamacpp cuda0": 2_000_000})
    both = Needs(3_000_000, {"llamacpp cuda0": 4_000_000})
    assert free.shortage(both) == "3 MB of 1 MB free"
    assert free.shortage(Needs(0, both.on_devices)) == "4 MB of 2 MB free on llamacpp cuda0"
    assert free.shortage(Needs(1_000_000, {"llamacpp cuda0": 2_000_000})) is None
