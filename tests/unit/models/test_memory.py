"""Memory as it is told to the user: sums, one line, a warning."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.models import devices as memory_module
from edge_spec.models.devices import (
    Memory,
    Sizing,
    free_bytes,
    resident_bytes,
    total_bytes,
)
from edge_spec.models.memory import Forecast, ModelMemory, forecast
from edge_spec.models.options import LoadOptions
from edge_spec.models.runtimes import load_runtime
from edge_spec.runtimes.llamacpp import runtime as llamacpp_runtime
from edge_spec.testing import ScriptedModel, random_logits

MB = 1_000_000
NOTHING = RuntimeOptions()
MODEL = Memory(weights=100 * MB, cache=20 * MB, work=10 * MB, library=30 * MB)


class Counting:
    """A runtime whose memory is the tokens in use, and which can open nothing."""

    reads = "onnx"

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[RuntimeOptions, int | None]] = []

    def memory(self, source: Any, options: RuntimeOptions, num_tokens: int | None = None) -> Memory:
        self.asked.append((options, num_tokens))
        return MODEL


def prepared(
    runtime: Any, name: str = "m", context_length: int = 1000, how: RuntimeOptions = NOTHING
) -> Any:
    config = ScriptedModel(random_logits(8), 8, context_length).config
    return SimpleNamespace(name=name, runtime=runtime, source=None, config=config, how=how)


def pair(free: int | None, runtimes: tuple[str, str] = ("ort", "llamacpp")) -> Forecast:
    models = [
        ModelMemory(role, name, runtime, MODEL)
        for role, name, runtime in zip(("target", "draft"), ("t", "d"), runtimes, strict=True)
    ]
    return Forecast(tuple(models), free)


def test_a_pair_is_told_in_one_line_whose_parts_add_up() -> None:
    assert str(pair(24_000 * MB, ("ort", "ort"))) == (
        "target t on ort 160 MB + draft d on ort 130 MB = 290 MB of 24.0 GB free"
    )
    assert str(replace(pair(None), models=pair(None).models[:1])) == "target t on ort 160 MB"


def test_it_fits_to_the_byte() -> None:
    assert pair(320 * MB).fits and not pair(320 * MB - 1).fits


@pytest.mark.parametrize(("context", "expected"), [(None, 1000), (64, 64), (5000, 1000)])
def test_a_draft_holds_the_target_s_text_and_has_options_of_its_own(
    context: int | None, expected: int
) -> None:
    target, draft = Counting("a"), Counting("b")
    options = LoadOptions(context_length=context)
    how, draft_how = options.runtime_options, options.draft_runtime_options
    found = forecast(prepared(target, how=how), [prepared(draft, "d", 9000, draft_how)])
    assert found is not None
    assert (target.asked, draft.asked) == ([(how, expected)], [(draft_how, expected)])
    assert [model.role for model in found.models] == ["target", "draft"]


def test_a_runtime_that_cannot_tell_leaves_the_pair_untold() -> None:
    other = SimpleNamespace(name="other", reads="onnx", open=None)
    assert not isinstance(other, Sizing)
    assert forecast(prepared(Counting("a")), [prepared(other)]) is None


def test_memory_that_the_process_touches_is_resident() -> None:
    """How much else there is, other tests of the process decide."""
    if resident_bytes() is None:
        pytest.skip("the system does not say")
    with mmap.mmap(-1, 256 * MB) as touched:
        touched[:: mmap.PAGESIZE] = b"x" * len(touched[:: mmap.PAGESIZE])
        assert (resident_bytes() or 0) > 256 * MB


def gguf_source(path: Path, kind: str = "Q4_0") -> Any:
    """A file of 5,000 bytes with three matrices of 100 bytes, embedding among them."""
    file = path / "m.gguf"
    file.write_bytes(b"0" * 5000)
    tensor = SimpleNamespace(kind=SimpleNamespace(name=kind), data=np.zeros(100, np.uint8))
    names = ("model.embed_tokens.weight", "a.weight", "b.weight")
    config = replace(ScriptedModel(random_logits(8), 8, 5000).config, tied_embeddings=True)
    return SimpleNamespace(
        path=file,
        config=config,
        tensors=dict.fromkeys(names, tensor),
        weight_types=frozenset({kind}),
    )


@pytest.mark.parametrize(
    ("kernels", "kind", "mmap", "copied"),
    [
        ("", "Q4_0", None, 200),
        ("", "Q4_0", False, 0),
        ("", "Q8_0", None, 0),
        ("avx2 of a build", "Q4_0", None, 0),  # they let go of the file
    ],
)
def test_what_a_library_copies_of_the_weights_is_counted(
    kernels: str,
    kind: str,
    mmap: bool | None,
    copied: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llamacpp_runtime, "wanted", lambda: kernels)
    sizing: Any = load_runtime("llamacpp")
    source, other = gguf_source(tmp_path, kind), gguf_source(tmp_path, "F32")
    uncopied = SimpleNamespace(kind=SimpleNamespace(name="F32"), data=np.zeros(300, np.uint8))
    other.tensors = {"norm": uncopied}  # as many bytes
    options = RuntimeOptions(mmap=mmap)
    assert sizing.memory(source, options).weights - sizing.memory(other, options).weights == copied


def test_a_container_has_what_its_groups_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The least of the system's and of every group's above the process; cached files count as
    free."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "own").write_text("4:memory:/elsewhere\n0::/outer/inner\n")
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    for name, value in (("MEMINFO", "meminfo"), ("GROUP", "own"), ("GROUPS", "groups")):
        monkeypatch.setattr(memory_module, name, tmp_path / value)
    assert (free_bytes(), total_bytes()) == (8000 * 1024, 9000 * 1024)
    for group, limit in ((inner, "max"), (inner.parent, "6000000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("5000000\n")
        (group / "memory.stat").write_text("anon 1\nactive_file 1000000\ninactive_file 500000\n")
    assert (free_bytes(), total_bytes()) == (2_500_000, 6_000_000)
    (inner.parent / "memory.current").write_text("9000000\n")
    assert free_bytes() == 0
