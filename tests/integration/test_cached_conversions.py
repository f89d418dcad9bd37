"""A conversion in the cache is used again while it is whole, and made anew when it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.load_options import LoadOptions
from edge_spec.preparation import prepare
from edge_spec.sources import Source


def converted(model: Path, runtime: str) -> list[str]:
    told: list[str] = []

    def tell(what: str, fraction: float) -> None:
        told.append(what)

    prepare(Source(str(model), tell), runtime, LoadOptions(), tell)
    return told


def largest(cache: Path) -> Path:
    files = (path for path in (cache / "bundles").rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("runtime", ["ort", "llamacpp"])
@pytest.mark.parametrize("damage", ["a bit", "the end", "all of it"])
def test_a_damaged_conversion_is_made_anew(
    runtime: str,
    damage: str,
    hf: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip({"ort": "onnxruntime", "llamacpp": "llama_cpp"}[runtime])
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    assert converted(hf(), runtime) and not converted(hf(), runtime)
    file = largest(tmp_path)
    whole = file.read_bytes()
    if damage == "all of it":
        file.unlink()
    else:
        changed = {"a bit": whole[:-1] + bytes([whole[-1] ^ 1]), "the end": whole[:-1]}
        file.write_bytes(changed[damage])
    assert converted(hf(), runtime)
    assert file.read_bytes() == whole and not converted(hf(), runtime)
    assert len(caplog.messages) == (0 if damage == "all of it" and runtime == "llamacpp" else 1)
