"""Whose memory a model's bytes are counted to."""

from __future__ import annotations

import pytest

from edge_spec.models.devices import Device, Memory
from edge_spec.models.memory import MAIN, Forecast, ModelMemory, by_label, room, shortage


def card(runtime: str, name: str) -> Device:
    return Device(runtime, name, "gpu", "a card", 200, 100)


def on(name: str) -> ModelMemory:
    return ModelMemory("target", "m", "llamacpp", Memory(10, 0, 0, on_devices={name: 60}))


@pytest.mark.parametrize(("name", "is_same"), [("CUDA0", True), ("cuda", True), ("cuda1", False)])
def test_models_on_one_device_are_counted_together(name: str, is_same: bool) -> None:
    devices = by_label([card("llamacpp", "cuda0"), card("llamacpp", "cuda1")])
    found = Forecast((on("cuda0"), on(name)), None, devices)
    own = {"llamacpp cuda0": 120} if is_same else {"llamacpp cuda0": 60, "llamacpp cuda1": 60}
    assert found.needs == {MAIN: 20, **own}
    assert found.fits is not is_same


def test_a_device_without_memory_of_its_own_takes_the_processors() -> None:
    shared = Device("llamacpp", "vulkan0", "gpu", "integrated", 900, 900, shares_memory=True)
    devices = by_label([shared])
    assert Forecast((on("vulkan0"),), None, devices).needs == {MAIN: 70}
    assert room(None, devices) == {}


def test_all_that_a_device_has_counts_where_room_is_made() -> None:
    devices = by_label([card("llamacpp", "cuda0")])
    assert room(5, devices) == {MAIN: 5, "llamacpp cuda0": 100}
    assert room(5, devices, in_all=True) == {MAIN: 5, "llamacpp cuda0": 200}


def test_the_processor_s_memory_comes_first_and_all_shortages_name_their_place() -> None:
    free = {MAIN: 1_000_000, "llamacpp cuda0": 2_000_000}
    on_device = {"llamacpp cuda0": 4_000_000}
    assert shortage({MAIN: 3_000_000, **on_device}, free) == "3 MB of 1 MB free"
    assert shortage({MAIN: 0, **on_device}, free) == "4 MB of 2 MB free on llamacpp cuda0"
    assert shortage(free, free) is None
