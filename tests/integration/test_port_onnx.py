"""The ONNX section of docs/mobile.md says all that an app needs to run a bundle's graph.

generation.json is decoded by onnxruntime alone, with inputs, outputs and cache as on that page and
nothing of edge_spec's own session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from fixtures import tolerance
from fixtures.tiny_generation import write_model

onnxruntime: Any = pytest.importorskip("onnxruntime")
VECTORS = Path(__file__).parents[2] / "docs" / "vectors"
CASES = json.loads((VECTORS / "generation.json").read_text("utf-8"))["cases"]


class App:
    """A cache in buffers of its own, which each pass reads and writes in place."""

    def __init__(self, bundle: Path) -> None:
        described = json.loads((bundle / "manifest.json").read_text("utf-8"))["architecture"]
        graph = str(bundle / "model.onnx")
        self._session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self._vocab, self._hidden = described["vocab_size"], described["hidden_size"]
        shape = (
            1,
            described["num_kv_heads"],
            described["context_length"] + 1,
            described["head_dim"],
        )
        self._cache = {
            f"{layer}.{part}": np.zeros(shape, np.float32)
            for layer in range(described["num_layers"])
            for part in ("key", "value")
        }
        self.cached = 0
        self._has_two_forms = "stacked" in {value.name for value in self._session.get_inputs()}

    def score(self, tokens: Sequence[int], depths: Sequence[int], sees: np.ndarray) -> np.ndarray:
        """sees: [rows, rows] bool."""
        rows = len(tokens)
        is_stacked = self._has_two_forms and rows < 8
        repeated = list(range(rows)) if rows > 1 or is_stacked else [0, 0]
        total = self.cached + len(repeated)
        capacity = self._cache["0.key"].shape[2] if is_stacked else total
        bias = np.zeros((1, 1, len(repeated), capacity), np.float32)
        bias[..., total:] = -np.inf
        if rows > 1:
            bias[0, 0, :, self.cached : total][~sees] = -np.inf
        logits = np.empty((rows, self._vocab), np.float32)
        binding = self._session.io_binding()
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_rows": np.array(repeated, np.int64),
            "kept_rows": np.arange(rows),
            "position_ids": np.array([[self.cached + depths[row] for row in repeated]], np.int64),
            "attention_bias": bias,
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logit_rows": np.arange(rows),
        }
        if self._has_two_forms:
            inputs["stacked"] = np.array([is_stacked])
            inputs["cached_tokens"] = np.array([self.cached], np.int64)
        outputs = {"logits": logits, "hidden": np.empty((rows, self._hidden), np.float32)}
        for name, buffer in self._cache.items():
            inputs[f"past.{name}"] = outputs[f"present.{name}"] = buffer
        values = {
            id(array): onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for array in [*inputs.values(), *outputs.values()]
        }
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, values[id(array)])
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, values[id(array)])
        self._session.run_with_iobinding(binding)
        return logits

    def commit(self, rows: Sequence[int]) -> None:
        for buffer in self._cache.values():
            kept = buffer[:, :, [self.cached + row for row in rows]]
            buffer[:, :, self.cached : self.cached + len(rows)] = kept
        self.cached += len(rows)

    def tree(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        depths, sees = [0], np.eye(len(tokens), dtype=bool)
        for row, parent in enumerate(parents[1:], start=1):
            depths.append(depths[parent] + 1)
            sees[row] |= sees[parent]
        if self.cached or len(tokens) == 1:
            return self.score(tokens, depths, sees)
        root = self.score(tokens[:1], [0], sees[:1, :1])
        self.cached = 1
        rest = self.score(tokens[1:], [depth - 1 for depth in depths[1:]], sees[1:, 1:])
        self.cached = 0
        return np.concatenate([root, rest])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    return open_checkpoint(write_model(tmp_path_factory.mktemp("source") / "tiny"))


@pytest.fixture(scope="module", params=["one form of attention", "two forms"])
def make_app(
    request: pytest.FixtureRequest,
    source: StoredCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[], App]:
    bundle = tmp_path_factory.mktemp("port") / "bundle"
    options = ExportOptions("fp32", check=False)
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "two forms":  # which so small a model does not need
            patched.setattr("edge_spec.exporters.onnx.stacked._MIN_KV_SIZE", 1)
        OnnxExporter().export(source, bundle, options, lambda what, fraction: None)
    return lambda: App(bundle)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("whole", [True, False], ids=["prompt at once", "token by token"])
def test_a_generation_is_decoded_with_the_graph_alone(
    case: Any, whole: bool, source: StoredCheckpoint, make_app: Callable[[], App]
) -> None:
    app = make_app()
    prompt = case["prompt"][:-1]
    for part in [prompt] if whole else [[token] for token in prompt]:
        app.score(part, range(len(part)), np.tri(len(part), dtype=bool))
        app.commit(range(len(part)))
    for described in case["rounds"]:
        logits = app.tree(described["tree"]["tokens"], described["tree"]["parents"])
        positions = described["length"] + len(logits)
        expected = described["logits"]
        tolerance.require_float32(logits, expected, source.config, positions, tolerance.WRITTEN)
        app.commit(described["kept"])
    assert app.cached == len(case["prompt"]) - 1 + len(case["text"])


def test_a_tree_on_an_empty_cache_needs_its_root_first(
    source: StoredCheckpoint, make_app: Callable[[], App]
) -> None:
    """And is then what it is after a pass of its first row."""
    tokens, parents = [5, 6, 7, 8], [-1, 0, 0, 2]
    alone = make_app().tree(tokens, parents)
    for path in ([0, 1], [0, 2, 3]):
        app = make_app()
        for row in path:
            found = app.score([tokens[row]], [0], np.ones((1, 1), bool))
            app.commit([0])
            tolerance.require_float32(alone[row], found[0], source.config, len(tokens))
