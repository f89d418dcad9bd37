"""Chooses where sessions keep keys and values, and for how many tokens there is room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from edge_spec.core.config import ModelConfig
from edge_spec.runtimes.ort.devices import ProviderChoice

# Providers with memory of their own, and what onnxruntime's OrtValue calls it where it has
# addresses. None: it has none, so that they compute on copies of what is in main memory.
_MEMORIES = {"CUDAExecutionProvider": "cuda", "WebGpuExecutionProvider": None}
FIRST_TOKENS = 512


class Place(NamedTuple):
    """Memory as onnxruntime names it. is_copied: it is main memory, of which every pass has to be
    given a copy."""

    device: str
    number: int  # of several such devices
    is_copied: bool = False


def place_of(chosen: Iterable[ProviderChoice]) -> Place | None:
    """Returns the place for providers in their order; None: they compute in main memory."""
    choice = with_memory(chosen)
    if choice is None:
        return None
    memory = _MEMORIES[choice.provider]
    if memory is None:
        return Place("cpu", 0, is_copied=True)
    return Place(memory, int(choice.options.get("device_id", "0")))


def shares_weights(place: Place, config: ModelConfig) -> bool:
    """Returns whether graphs of a model share its large weights there: those of experts are not."""
    return not place.is_copied and config.experts is None


def with_memory(chosen: Iterable[ProviderChoice]) -> ProviderChoice | None:
    """Returns the first that has memory of its own."""
    return next((choice for choice in chosen if choice.provider in _MEMORIES), None)


def capacity_for(needed: int, capacity: int, context_length: int) -> int:
    """Returns for how many tokens a cache has room that had it for `capacity`: it doubles."""
    room = max(FIRST_TOKENS, capacity)
    while room < needed:
        room *= 2
    return min(room, context_length)
