"""How many layers leave the CPU: by what devices have free, on one and on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp.library import LibraryDevice
from edge_spec.runtimes.llamacpp.memory import model_parts, offload

LAYERS = 6  # and a head
WANTED = RuntimeOptions()


@pytest.fixture(scope="module")
def source(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("offload") / "model.gguf"
    model = tiny.build(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    return runtimes.open_model_info(tiny.write_gguf(model, path))


def gpu(free_bytes: int, number: int = 0) -> LibraryDevice:
    return LibraryDevice(f"CUDA{number}", "a card", False, free_bytes, 2 * free_bytes, number + 1)


def needs(source: ModelInfo, count: int) -> int:
    """Of one device for the head and the last `count` - 1 layers; a tenth stays free."""
    found = offload(source, replace(WANTED, gpu_layers=count), [gpu(1)])
    return int(sum(found.by_device.values()) / 0.9) + 1


def test_as_many_layers_leave_the_cpu_as_fit(source: ModelInfo) -> None:
    for count in range(1, LAYERS + 2):
        free = needs(source, count)
        found = offload(source, WANTED, [gpu(free)])
        assert (found.num_layers, found.num_cached) == (count, count - 1)
        assert offload(source, WANTED, [gpu(free - 2)]).num_layers == count - 1
    assert offload(source, WANTED, [gpu(0)]).num_layers == LAYERS + 1  # it does not say: all


def test_two_devices_share_what_is_offloaded_by_what_is_free(source: ModelInfo) -> None:
    """As llama.cpp shares it out, so that the small one is not asked for more than it has."""
    parts = model_parts(source, WANTED, None)
    one = parts.layers[0] + parts.cache
    large, small = gpu(3 * needs(source, LAYERS + 1)), gpu(needs(source, LAYERS + 1), 1)
    found = offload(source, WANTED, [large, small])
    assert found.num_layers == LAYERS + 1
    # Of 7, three quarters begin on the first: layers 0 to 5. The head is what is left.
    assert found.by_device == {"cuda0": 6 * one + parts.work, "cuda1": parts.head + parts.work}
    few = gpu(needs(source, 1) // 2), gpu(needs(source, 1) // 2, 1)
    assert offload(source, WANTED, few).num_layers == 0
    # Whoever names one device gets no other.
    assert set(offload(source, WANTED, [small]).by_device) == {"cuda1"}
