"""What does not fit this machine is refused before it is read, and what is named instead fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceMemoryError
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import memory as fitting
from edge_spec.models.devices import Device, Memory
from edge_spec.models.memory import forecast, require_fit, require_room_to_convert
from edge_spec.models.model_plan import PreparedModel, prepare_model
from edge_spec.models.source import Source
from fixtures.silence import quiet

pytest.importorskip("llama_cpp")

CONTEXT = 100_000
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def long_file(tiny: ModuleType, tmp_path: Path) -> Path:
    """A context whose cache is larger than everything else."""
    model = tiny.build("qwen3", max_position_embeddings=CONTEXT, num_hidden_layers=4)
    return Path(tiny.write_gguf(model, tmp_path / "long.gguf", "F16"))


@pytest.fixture
def target(long_file: Path) -> PreparedModel:
    return prepare_model(Source(str(long_file), quiet), "llamacpp", quiet)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """machine(num_bytes): has so much memory."""
    return lambda num_bytes: monkeypatch.setattr(fitting, "total_bytes", lambda: num_bytes)


def with_context(target: PreparedModel, context: int) -> PreparedModel:
    return replace(target, how=replace(target.how, context_length=context))


def needed(target: PreparedModel, num_tokens: int) -> int:
    found = forecast(with_context(target, num_tokens), (), num_tokens)
    assert found is not None
    return found.needed


def refusal(target: PreparedModel, drafts: Any = ()) -> str:
    with pytest.raises(DeviceMemoryError) as caught:
        require_fit(target, drafts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does(
    target: PreparedModel, machine: Callable[[int], None]
) -> None:
    limit = needed(target, CONTEXT) * 3 // 4
    machine(limit)
    told = refusal(with_context(target, CONTEXT))
    assert f"long on llamacpp with {CONTEXT} tokens of context needs" in told
    found = re.search(r"--context (\d+)", told)
    assert found is not None
    context = int(found[1])
    assert needed(target, context) <= limit < needed(target, context + 256)
    require_fit(with_context(target, context), ())


def test_where_nothing_fits_a_smaller_model_is_asked_for(
    target: PreparedModel, machine: Callable[[int], None]
) -> None:
    machine(1000)
    told = refusal(target)
    assert (
        "--context" not in told
        and "smaller quantization or model." in told
        and "EDGE_SPEC_MEMORY=ignore" in told
    )


def test_nothing_is_refused_where_it_is_not_known_or_not_wanted(
    target: PreparedModel, monkeypatch: pytest.MonkeyPatch, machine: Callable[[Any], None]
) -> None:
    machine(None)
    require_fit(target, ())
    machine(1000)
    refusal(target)
    monkeypatch.setenv("EDGE_SPEC_MEMORY", "ignore")
    require_fit(target, ())


class Card:
    """A runtime on a device of its own that takes a megabyte a token."""

    name = "card"

    def __init__(self, free_mb: int, total_mb: int) -> None:
        size = (total_mb * 1_000_000, free_mb * 1_000_000)
        self._device = Device("card", "gpu0", "gpu", "a card", *size)

    def memory(self, source: Any, options: RuntimeOptions, num_tokens: int) -> Memory:
        return Memory(1, 0, 0, on_devices={"gpu0": num_tokens * 1_000_000})

    def devices(self, options: RuntimeOptions) -> list[Device]:
        return [self._device]


def on_card(target: PreparedModel, free_mb: int, total_mb: int = 8000) -> PreparedModel:
    return replace(target, runtime=Card(free_mb, total_mb))  # type: ignore[arg-type]


def test_a_device_s_own_memory_is_compared_with_what_is_free_there(target: PreparedModel) -> None:
    short = on_card(target, 3000)
    told = refusal(short)
    assert "long on card with 4096 tokens of context needs 4,096 MB of 3,000 MB free" in told
    assert "on card gpu0" in told and "--gpu-layers" in told and "another --device" in told
    assert "--context 2816" in told  # in steps of 256
    require_fit(with_context(short, 2816), ())
    require_fit(on_card(target, 4096), ())


def test_a_model_that_could_not_run_is_not_converted(
    long_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(fitting, "total_bytes", lambda: 10_000)
    assert run(["generate", str(long_file), "hello", "--runtime", "ort"]) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert "need" in line and "with 4 bits each" in line
    assert not [path for path in cache.glob("bundles/*") if path.suffix != ".lock"]
    model = open_checkpoint(long_file)
    monkeypatch.setattr(fitting, "total_bytes", lambda: model.config.num_parameters)
    require_room_to_convert(model)


def test_the_command_line_refuses_before_the_weights_are_read(
    long_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from edge_spec.runtimes.llamacpp import LlamaCppModel

    def opened(self: LlamaCppModel, *given: Any) -> None:
        raise AssertionError("its weights were read")

    monkeypatch.setattr(LlamaCppModel, "__init__", opened)
    monkeypatch.setattr(fitting, "total_bytes", lambda: 1000)
    arguments = ["generate", str(long_file), "hello", "--runtime", "llamacpp", "--raw"]
    assert run(arguments) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("edge-spec: long on llamacpp with 4096 tokens of context needs ")
