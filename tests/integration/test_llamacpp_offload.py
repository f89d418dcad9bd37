"""How many layers leave the CPU: by what devices have free, on one and on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import DeviceMemoryError
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppRuntime, upstream
from edge_spec.runtimes.llamacpp.library import LibraryDevice
from edge_spec.runtimes.llamacpp.memory import gguf_memory, model_parts
from edge_spec.runtimes.llamacpp.offload import fitted, offload

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


def test_numbers_that_were_asked_for_are_taken(source: ModelInfo) -> None:
    for asked, given in ((1, 1), (LAYERS, LAYERS), (999, LAYERS + 1)):
        options = replace(WANTED, gpu_layers=asked)
        found = fitted(source, options, [gpu(1)])
        assert found is not None and found.num_layers == given
    assert fitted(source, replace(WANTED, gpu_layers=0), [gpu(10**9)]) is None
    assert fitted(source, WANTED, []) is None


def test_it_is_told_where_not_all_fit(source: ModelInfo, caplog: pytest.LogCaptureFixture) -> None:
    assert fitted(source, WANTED, [gpu(needs(source, LAYERS + 1))]) is not None
    assert not caplog.messages
    fitted(source, WANTED, [gpu(needs(source, 3))])
    assert caplog.messages[0].startswith("cuda0 has room for 3 of 7 layers of model.gguf: ")
    assert fitted(source, WANTED, [gpu(1000)]) is None  # nobody asked for that device
    with pytest.raises(DeviceMemoryError, match="cuda0 has too little memory for any layer"):
        fitted(source, replace(WANTED, providers=("cuda0",)), [gpu(1000)])


def test_memory_is_told_by_device(source: ModelInfo) -> None:
    """What devices have, the processor's memory does not hold, but for embeddings and buffers."""
    whole = gguf_memory(source, WANTED, None)
    assert not whole.on_devices
    part = gguf_memory(source, WANTED, None, offload(source, WANTED, [gpu(needs(source, 3))]))
    parts = model_parts(source, WANTED, None)
    assert part.on_devices["cuda0"] == 2 * (parts.layers[0] + parts.cache) + parts.head + parts.work
    assert whole.weights - part.weights == 2 * parts.layers[0] + parts.head
    assert whole.cache - part.cache == 2 * parts.cache


@pytest.mark.parametrize("named", [None, "cuda0"])
def test_a_draft_is_on_the_cpu_unless_another_device_was_asked_for(
    named: str | None, source: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = pytest.importorskip("llama_cpp") and runtimes.load_runtime("llamacpp")
    assert isinstance(there, LlamaCppRuntime)
    monkeypatch.setattr(upstream, "own_devices", lambda: [gpu(10**9)])
    options = LoadOptions(device="cuda0", draft="small", draft_device=named)
    target = there.memory(source, options.runtime_options)
    draft = there.memory(source, options.draft_runtime_options)
    assert set(target.on_devices) == {"cuda0"}
    assert set(draft.on_devices) == ({"cuda0"} if named else set())
    assert options.drafts_elsewhere == (named is None)


def test_a_prompt_is_read_when_prefill_returns(
    llama: str, gguf: Callable[..., Path], open_llama: Any
) -> None:
    """The device is waited for after the last of its passes, not between them."""
    model = open_llama(llama, gguf())
    library, calls = model._weights.library, []

    def told(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return getattr(library, name)(*arguments)

        return call

    names = ("decode", "synchronize")
    model._weights.library = replace(library, **{name: told(name) for name in names})
    model.open_session().prefill([1] * 100)
    assert calls == ["decode", "synchronize"]
