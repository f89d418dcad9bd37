"""Ordinary small drafts: made of a target's layers, trained, and read like any model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.tree import TokenTree
from edge_spec.distill.features import Example, batch_of, windows_of
from edge_spec.distill.prompts import Conversation
from edge_spec.distill.request import DistillRequest
from edge_spec.distill.run import distill
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredTables
from edge_spec.models.asked_options import AskedOptions

torch = pytest.importorskip("torch")

from edge_spec.distill.trainees import SmallDraftTrainee, Teacher  # noqa: E402

POSITIONS = 3
ASKED = AskedOptions(runtime="reference", draft_runtime="reference", threads=1)


def quiet(what: str, fraction: float) -> None:
    """Tells nobody."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def example() -> Example:
    tokens = np.random.default_rng(0).integers(0, 265, 24, np.int32)
    return Example(Conversation(tokens, 6, False), 0, np.zeros((23, 1, 64), np.float16))


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama", {}),
        ("llama-tied", {}),
        ("llama-bias", {}),
        ("llama-linear", {}),
        ("llama-llama3", {}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_draft_is_trained_as_it_drafts(
    variant: str, changes: dict[str, Any], tiny: ModuleType, tmp_path: Path, example: Example
) -> None:
    """Each kept layer is another one of the target's, and all tensors are exact in float16."""
    model = tiny.build(variant, num_hidden_layers=5, **changes)
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "hf"))
    ids = np.arange(0, 265, 2)
    teacher = Teacher(source.config, StoredTables(source).output_rows(ids), ids)
    trainee = SmallDraftTrainee(teacher, source, 3, POSITIONS)
    batch = batch_of(windows_of([example], 64), POSITIONS)
    scores = [each.detach().numpy() for each in trainee.scores(batch)]
    drafts = trainee.drafts(batch)
    path = tmp_path / "draft"
    path.mkdir()
    trainee.drafter().write(path)
    written = open_checkpoint(path)
    assert written.config.num_layers == 3
    for name in ("input_layernorm.weight", "mlp.up_proj.weight"):
        for own, layer in enumerate((0, 2, 4)):
            kept = source.float32(f"model.layers.{layer}.{name}")
            np.testing.assert_array_equal(written.float32(f"model.layers.{own}.{name}"), kept)
    assert (written.eos_ids, written.bos_id) == (source.eos_ids, source.bos_id)
    assert written.chat_template == source.chat_template
    tokens = example.conversation.tokens.tolist()
    with edge_spec.load(str(path), runtime="reference", threads=1) as engine:
        session = engine.parts.model.open_session()
        logits = session.forward(TokenTree.chain(tokens[0], tokens[1:])).logits
        session.close()
    for at in (0, 5, 12):
        row = int(example.anchors[at])
        for position in range(POSITIONS):
            found = logits[row + 1 + position]
            # Float32, summed in another order: a hundredth of a percent of the largest score.
            np.testing.assert_allclose(scores[position][at], found[ids], rtol=1e-4, atol=2e-3)
            assert drafts[at, position] == found.argmax()


@pytest.fixture
def distilled(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """distilled(name, progress): a draft for tmp_path / "hf", by the same costs each time."""
    # Measured ones differ from run to run.
    passes_s = {1: 1.0, 2: 1.1, 4: 1.3}
    monkeypatch.setattr("edge_spec.distill.run.median_seconds", lambda passes: passes_s)
    monkeypatch.setattr("edge_spec.distill.training.time_untrained", lambda *given: 0.1)
    tiny.write_hf(tiny.build("llama", num_hidden_layers=3), tmp_path / "hf")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"tell me {index}" for index in range(20)))

    def call(name: str, progress: Any = quiet) -> Path:
        out = tmp_path / name
        given = {"num_tokens": 300, "max_tokens": 24, "vocabulary": 600, "epochs": 2}
        request = DistillRequest(out, "draft", prompts, **given)
        distill(str(tmp_path / "hf"), ASKED, request, progress)
        return out

    return call


@pytest.mark.parametrize(
    "step",
    ["Writing answers", "Reading what", "Training ("],
)
def test_an_interrupted_draft_is_the_same_draft(
    step: str,
    distilled: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = distilled("whole")
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "other-cache"))

    def stop(what: str, fraction: float) -> None:
        if what.startswith(step) and fraction > 0.1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distilled("cut", stop)
    assert not (tmp_path / "cut").exists()
    assert "the same command goes on with it" in caplog.text
    again = distilled("cut")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("runtime", ["reference", "ort"])
def test_a_draft_changes_no_text(
    runtime: str, distilled: Callable[..., Path], tmp_path: Path
) -> None:
    out, target = distilled("draft"), str(tmp_path / "hf")
    texts = []
    for draft in ("none", str(out)):
        with edge_spec.load(
            target, runtime=runtime, draft_runtime=runtime, draft=draft, threads=1
        ) as engine:
            with engine.verifying_all_draft_tokens():
                answer = engine.chat("tell me more", max_tokens=40)
            texts.append([token.id for token in answer.tokens])
            if draft != "none":
                assert answer.stats.draft_n > 0
    assert texts[0] == texts[1]
    left = [path.name for path in (tmp_path / "cache" / "bundles").glob(".*")]
    assert not left  # conversions of what was tried while it learnt
