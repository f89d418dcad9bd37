"""A conversion in the cache is used again while it is whole, and made again when it is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import UsageError
from edge_spec.models.model_plan import ModelPlan, prepare_model
from edge_spec.models.source import Source
from fixtures.axes import each
from fixtures.silence import quiet


def converted(model: Path, runtime: str) -> list[str]:
    told: list[str] = []

    def tell(what: str, fraction: float) -> None:
        told.append(what)

    prepare_model(Source(str(model), tell), runtime, tell)
    return told


def largest(cache: Path) -> Path:
    files = (path for path in (cache / "bundles").rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def test_nothing_is_converted_for_a_device_that_is_not_there(
    hf: Callable[..., Path], cache: Path
) -> None:
    """A large model takes minutes."""
    pytest.importorskip("onnxruntime")
    how = RuntimeOptions(providers=("abacus",))
    with pytest.raises(UsageError, match="no device 'abacus' here"):
        prepare_model(Source(str(hf()), quiet), "ort", quiet, how)
    assert not (cache / "bundles").exists()


@pytest.mark.parametrize(
    ("damage", "runtime"), each(["a bit", "the end", "all of it"], ["llamacpp", "ort"])
)
def test_a_damaged_conversion_is_made_anew(
    runtime: str,
    damage: str,
    hf: Callable[..., Path],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip({"ort": "onnxruntime", "llamacpp": "llama_cpp"}[runtime])
    assert converted(hf(), runtime) and not converted(hf(), runtime)
    file = largest(cache)
    whole = file.read_bytes()
    if damage == "all of it":
        file.unlink()
    else:
        changed = {"a bit": whole[:-1] + bytes([whole[-1] ^ 1]), "the end": whole[:-1]}
        file.write_bytes(changed[damage])
    assert converted(hf(), runtime)
    assert file.read_bytes() == whole and not converted(hf(), runtime)
    assert len(caplog.messages) == (0 if damage == "all of it" and runtime == "llamacpp" else 1)


def test_models_whose_names_have_dots_keep_conversions_of_their_own(
    hf: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    pytest.importorskip("llama_cpp")
    files = []
    for name, variant in (("Llama-3.2-1B", "llama"), ("Llama-3.2-3B", "qwen2")):
        shutil.copytree(hf(variant), tmp_path / name)
        source = Source(str(tmp_path / name), quiet)
        plan = ModelPlan(source, "llamacpp")
        assert not plan.is_there
        files.append(plan.prepare(source.progress).source.path)
        assert plan.is_there
    assert [file.name[:18] for file in files] == ["Llama-3.2-1B-gguf-", "Llama-3.2-3B-gguf-"]
    assert files[0].read_bytes() != files[1].read_bytes()
