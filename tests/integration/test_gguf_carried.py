"""K-quants, and whatever an exported GGUF file takes over from its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf import GgufExporter
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint

# Of random weights rounding takes this part of the norm, measured; a shuffled row takes 140 %.
ROUNDING = {"Q2_K": 0.5, "Q3_K": 0.25, "Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.03}

Paths = Callable[..., Path]


def write(checkpoint: StoredCheckpoint, out: Path, quantization: str) -> None:
    options = ExportOptions(quantization, check=False)
    GgufExporter().export(checkpoint, out, options, lambda what, fraction: None)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.fixture(scope="session")
def wide(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    """A model with rows of 256, which K-quants need."""
    model = tiny.build(hidden_size=256, intermediate_size=512, head_dim=64)
    directory = tmp_path_factory.mktemp("wide") / "wide"
    return open_checkpoint(tiny.write_hf(model, directory))


@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_k_quants_hold_the_weights_but_for_rounding(
    quantization: str, wide: StoredCheckpoint, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    write(wide, tmp_path / "out.gguf", quantization)
    written = open_checkpoint(tmp_path / "out.gguf")
    kinds = set()
    for name in wide.names():
        error = relative_error(written.float32(name), wide.float32(name))
        kind = written.tensors[name].kind.name
        assert error <= (0.0 if kind == "F32" else ROUNDING[kind]), name
        kinds.add(kind)
    assert f"Q{quantization[1]}_K" in kinds
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("quantization", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3", "llama-llama3"])
def test_what_has_the_type_already_is_carried_over_bit_for_bit(
    variant: str, quantization: str, gguf: Paths, tmp_path: Path
) -> None:
    """From a file that another writer made, in llama.cpp's row order."""
    source = gguf(variant, quantization)
    write(open_checkpoint(source), tmp_path / "out.gguf", quantization)
    before, after = GgufFile(source).tensors, GgufFile(tmp_path / "out.gguf").tensors
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].kind == tensor.kind
        assert after[name].data.tobytes() == tensor.data.tobytes(), name


def test_what_a_file_says_of_its_tokenizer_and_origin_is_kept(
    tiny: ModuleType, tmp_path: Path
) -> None:
    extras = {
        "general__license": "apache-2.0",
        "general__name": "Tiny of someone",
        "tokenizer__ggml__unheard_of": "kept",
        "llama__unheard_of": "dropped: it may not hold for the new file",
    }
    source = tiny.write_gguf(tiny.build(), tmp_path / "in.gguf", **extras)
    write(open_checkpoint(source), tmp_path / "out.gguf", "Q8_0")
    before, after = GgufFile(source), GgufFile(tmp_path / "out.gguf")
    kept = {key for key in before.metadata if key.startswith("tokenizer.")}
    assert len(kept) == 10
    for key in kept | {"general.license", "general.name"}:
        np.testing.assert_equal(after.metadata[key], before.metadata[key], err_msg=key)
        assert after.kinds[key] == before.kinds[key]
    assert "llama.unheard_of" not in after.metadata
    assert after.metadata["general.file_type"] == 7
