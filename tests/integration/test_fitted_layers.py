"""A conversion in a stream: as of the opened model, in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.exporters import block_quantize
from edge_spec.exporters.block_quantize import (
    FittedLayers,
    calibration_sequences,
    importance,
    input_correction,
    quantize,
    quantize_stored,
    weigh_columns,
)
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference import ReferenceRuntime
from fixtures.silence import quiet

LAYERS = "model.layers"
QKV = [f"self_attn.{each}_proj.weight" for each in "qkv"]
GROUPS = (
    QKV,
    ["self_attn.o_proj.weight"],
    ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    ["mlp.down_proj.weight"],
)


class Replaced:
    """A checkpoint with other matrices."""

    def __init__(self, source: StoredCheckpoint, weights: dict[str, np.ndarray]) -> None:
        self.config = source.config
        self.float32_rows = source.float32_rows
        self.float32 = lambda name: weights[name] if name in weights else source.float32(name)


def inputs_of(source: object, texts: list[list[int]], layers: int) -> dict[str, np.ndarray]:
    seen: dict[str, np.ndarray] = {}
    stream = ReferenceRuntime().open_layers(source, texts, seen.__setitem__)  # type: ignore[arg-type]
    for _ in range(layers):
        stream.advance()
    return seen


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_each_matrix_is_fitted_to_what_it_gets_of_those_before_it(
    variant: str, checkpoint: Callable[..., StoredCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, from whole passes of the model with all matrices so far in blocks."""
    monkeypatch.setattr(block_quantize, "_MAX_TOKENS", 512)
    source = checkpoint(variant)
    texts = calibration_sequences(source, 512)
    exact = inputs_of(source, texts, source.config.num_layers)
    layers, made = FittedLayers(source, 4), {}
    for layer in range(source.config.num_layers):
        for group in GROUPS:
            names = [f"{LAYERS}.{layer}.{each}" for each in group]
            inputs = inputs_of(Replaced(source, made), texts, layer + 1)[names[0]]
            correction = input_correction(inputs, exact[names[0]])
            assert correction is not None
            weights = np.concatenate([source.float32(name) for name in names])
            expected = quantize(weights @ correction, 4, importance=importance(inputs))
            found = layers.take(names).dequantize()
            # Another order of sums may round one weight in thousands the other way.
            assert np.mean(np.abs(found - expected.dequantize()) > 1e-4) < 2e-3, names
            plain = quantize(weights, 4).dequantize()
            wanted = exact[names[0]] @ weights.T
            errors = [np.square(inputs @ each.T - wanted).sum() for each in (found, plain)]
            assert errors[0] < errors[1], names
            ends = np.cumsum([source.tensors[name].shape[0] for name in names])
            made |= dict(zip(names, np.split(found, ends[:-1]), strict=True))


def test_columns_count_as_much_as_what_they_are_multiplied_with(
    checkpoint: Callable[..., StoredCheckpoint],
) -> None:
    """In all exports whose matrices are not fitted, and of some rows as of all."""
    source, name = checkpoint("llama"), f"{LAYERS}.1.mlp.down_proj.weight"
    weighed = weigh_columns(source, quiet)
    tensor, plain = weighed.tensors[name], source.tensors[name]
    assert tensor.importance is not None and tensor.importance.shape == plain.shape[1:]
    assert weighed.tensors["model.norm.weight"].importance is None
    values = source.float32(name)
    found, other = (
        quantize_stored([each], 4, symmetric=True).dequantize() for each in (tensor, plain)
    )
    errors = [(np.square(each - values) * tensor.importance).sum() for each in (found, other)]
    assert errors[0] < errors[1]
    part = quantize_stored([tensor.rows(slice(8, 16))], 4, symmetric=True)
    np.testing.assert_array_equal(part.dequantize(), found[8:16])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bound"), [("Q4_0", 100e6), ("Q4_1", 300e6)])
def test_what_is_allocated_is_a_layer(
    kind: str, bound: float, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in float32 has 580 MB. What is allocated is counted, not what the machine has of it
    in memory."""
    monkeypatch.setattr(block_quantize, "_MAX_TOKENS", 256)  # each of which has states, too
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256}
    model = tiny.build(num_hidden_layers=10, **shape)
    for values in model.weights.values():
        values *= 0.1 if values.ndim == 2 else 1
    source = open_checkpoint(tiny.write_gguf(model, tmp_path / "model.gguf", kind))
    del model
    tracemalloc.start()
    try:
        OnnxExporter().export(source, tmp_path / "out", ExportOptions("int4"), lambda *_: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(kind, peak)
    assert peak < bound
