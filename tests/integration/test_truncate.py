"""A model's first layers: as if it had never had the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.errors import UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.parity import score_text
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import tolerance

Tokens = Callable[..., list[int]]


def shallow(tiny: ModuleType, variant: str, directory: Path) -> StoredCheckpoint:
    """A model of one layer with the weights of the usual one."""
    whole, one = tiny.build(variant), tiny.build(variant, num_hidden_layers=1)
    one.weights.update({name: whole.weights[name] for name in one.weights})
    return open_checkpoint(tiny.write_hf(one, directory))


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_it_scores_as_a_model_that_has_only_these_layers(
    source: str,
    variant: str,
    tiny: ModuleType,
    tmp_path: Path,
    tokens: Tokens,
    request: pytest.FixtureRequest,
) -> None:
    first = first_layers(open_checkpoint(request.getfixturevalue(source)(variant)), 1)
    expected = shallow(tiny, variant, tmp_path / "one")
    assert list(first.names()) == list(expected.names())
    assert first.tokenizer_json()
    text = tokens(40)
    found, wanted = (score_text(ReferenceModel(source), text) for source in (first, expected))
    tolerance.require_float32(found, wanted, first.config, len(text))


@pytest.mark.parametrize("num_layers", [-1, 0, 3])
def test_a_count_that_the_model_does_not_have_is_refused(
    num_layers: int, checkpoint: Callable[..., StoredCheckpoint], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"has 2 layers, {num_layers} are asked.*1 to 2"):
        first_layers(checkpoint(), num_layers)
    options = ExportOptions("fp32", num_layers=num_layers)
    with pytest.raises(UsageError, match="has 2 layers"):
        OnnxExporter().export(checkpoint(), tmp_path / "out", options, lambda what, part: None)
    assert not list(tmp_path.iterdir())
