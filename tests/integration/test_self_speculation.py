"""Parts of a model that draft for it, from the search to the text, on onnxruntime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.cli.main import run
from edge_spec.core.export import ExportOptions
from edge_spec.engine.engine import Engine
from edge_spec.errors import UsageError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader import load_engine
from edge_spec.models.bundle import open_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.placement.layer_selection import save_parts, saved_parts
from edge_spec.scheduler.policy import FixedPolicy

LAYERS = 6
STILL = {4, 5, 8, 9}  # sublayers that add nothing
PROMPT = np.random.default_rng(0).integers(3, 250, 90).tolist()


@pytest.fixture
def bundle(tiny: ModuleType, tmp_path: Path) -> Path:
    """Four useful layers, and two between them that add nothing."""
    model = tiny.build("llama", num_hidden_layers=LAYERS, max_position_embeddings=512)
    for sublayer in STILL:
        last = ("self_attn.o_proj", "mlp.down_proj")[sublayer % 2]
        model.weights[f"model.layers.{sublayer // 2}.{last}.weight"][:] = 0
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "hf"))
    options = ExportOptions("fp32", check=False)
    OnnxExporter().export(source, tmp_path / "out", options, lambda what, fraction: None)
    return tmp_path / "out"


def opened(path: Path, drafter: str, **options: Any) -> Engine:
    loaded = LoadOptions(runtime="ort", drafter=drafter, threads=1, **options)
    engine = load_engine(str(path), loaded, lambda what, fraction: None)
    if drafter != "none":  # whether or not it pays on this machine
        drafting = engine._drafting
        policy = FixedPolicy(branches=False)
        drafting.speculation = replace(drafting.speculation, policy=policy)
    return engine


def text(engine: Engine) -> list[int]:
    return [token.id for token in engine.generate(PROMPT, max_tokens=60).tokens]


def test_what_adds_nothing_is_found_kept_and_left_out(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(bundle, "none") as engine:
        plain = text(engine)
    assert run(["tune-skip", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert "early-exit: exit at layer" in said and "layer-skip: " in said
    part = saved_parts(open_bundle(bundle))["layer-skip"]
    assert set(part.skipped) & STILL
    # What a part promises here depends on the machine; that it is asked does not.
    part = replace(part, skipped=tuple(sorted(STILL)), forecast=2.0)
    save_parts(open_bundle(bundle), {"layer-skip": part})
    with opened(bundle, "layer-skip") as engine:
        assert text(engine) == plain
        stats = engine.last.stats if engine.last else None
        assert stats is not None and stats.draft_n_accepted > 20
        assert stats.draft_n_accepted == stats.draft_n  # it agrees with the whole model


@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_an_exit_that_was_asked_for_leaves_the_text_as_it_is(bundle: Path, layer: int) -> None:
    with opened(bundle, "none") as engine:
        plain = text(engine)
    with opened(bundle, "early-exit", exit_layer=layer) as engine:
        assert text(engine) == plain
        assert engine.last is not None and engine.last.stats.draft_n > 0
        engine.set_drafter("none")
        assert text(engine) == plain


def test_without_a_part_a_line_says_how_to_find_one(bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"drafter early-exit leaves out.*tune-skip.*exit-layer"):
        opened(bundle, "early-exit")
    with pytest.raises(UsageError, match=r"drafter layer-skip leaves out.*tune-skip\.$"):
        opened(bundle, "layer-skip")


@pytest.mark.parametrize("layer", [0, LAYERS, -1])
def test_an_exit_that_the_model_does_not_have_is_refused(bundle: Path, layer: int) -> None:
    with pytest.raises(UsageError, match=f"cannot exit at layer {layer}"):
        opened(bundle, "early-exit", exit_layer=layer)
