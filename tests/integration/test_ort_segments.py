"""A model in segments, loaded at the same time: it scores as the whole graph does, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError, SessionError
from edge_spec.exporters.onnx import OnnxExporter, attention, segments
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import MANIFEST, Bundle, list_files, open_bundle
from edge_spec.runtimes.ort import OrtModel, OrtRuntime
from edge_spec.runtimes.ort.segments import SegmentedInference, segment_files
from fixtures import families

LAYERS = 4
TWO_FORMS = "llama with two forms of attention"
VARIANTS = ("llama", "llama-bias", "qwen3", TWO_FORMS)

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]
Export = Callable[..., Bundle]


@pytest.fixture(scope="module")
def export(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """export(quantization, variant, count=2): a bundle of `count` segments; 1: of the whole."""

    @cache
    def made(quantization: str = "int4", variant: str = "llama", count: int = 2) -> Bundle:
        directory = tmp_path_factory.mktemp("segments")
        model = tiny.build(
            variant.split()[0], num_hidden_layers=LAYERS, max_position_embeddings=1024
        )
        source = open_checkpoint(tiny.write_hf(model, directory / "hf"))
        options = ExportOptions(quantization, check=False)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(segments, "SEGMENT_BYTES", 1)
            if variant == TWO_FORMS:
                patched.setattr(attention, "_MIN_KV_SIZE", 1)
            patched.setattr(segments, "MAX_SEGMENTS", count)
            OnnxExporter().export(source, directory / "out", options, lambda what, part: None)
        bundle = open_bundle(directory / "out")
        assert len(segment_files(bundle)) == (count if count > 1 else 0)
        return bundle

    return made


def test_convolutions_are_cut_apart_bit_for_bit(
    tmp_path: Path, random_tree: RandomTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    source = open_checkpoint(families.write_hf("lfm2", tmp_path / "hf"))
    options = ExportOptions("int4", check=False)
    OnnxExporter().export(source, tmp_path / "out", options, lambda what, part: None)
    bundle = open_bundle(tmp_path / "out")
    sessions = [model.open_session() for model in (opened(bundle), whole(bundle))]
    for session in sessions:
        session.prefill(families.texts()[0].tolist())
    for rows in (1, 5, 1, 9):
        tree = random_tree(rows)
        one, other = (session.forward(tree) for session in sessions)
        np.testing.assert_array_equal(one.logits, other.logits)
        for session in sessions:
            session.commit(tree.path(rows - 1))


@pytest.fixture
def copy(export: Export, tmp_path: Path) -> Bundle:
    """A bundle to damage."""
    return open_bundle(Path(shutil.copytree(export().path, tmp_path / "bundle")))


def opened(bundle: Bundle) -> OrtModel:
    model = OrtRuntime().open(bundle, RuntimeOptions(threads=2))
    assert isinstance(model, OrtModel)
    return model


def without(bundle: Bundle, names: Sequence[str]) -> Bundle:
    """As if it had been written without these files."""
    files = {name: each for name, each in bundle.manifest.files.items() if name not in names}
    return Bundle(bundle.path, bundle.manifest.model_copy(update={"files": files}))


def whole(bundle: Bundle) -> OrtModel:
    return opened(without(bundle, segment_files(bundle)))


@pytest.mark.parametrize(
    ("quantization", "variant", "count"),
    [("int4", variant, 2) for variant in VARIANTS]
    + [("int8", "llama", 3), ("fp16", "llama", 2), ("fp32", "llama-tied", LAYERS)],
)
def test_every_pass_scores_as_the_whole_graph_bit_for_bit(
    quantization: str,
    variant: str,
    count: int,
    export: Export,
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    bundle = export(quantization, variant, count)
    models = opened(bundle), whole(bundle)
    assert isinstance(models[0]._inference, SegmentedInference)
    sessions = [model.open_session() for model in models]
    text = tokens(600)
    for session in sessions:
        session.prefill(text[:300])  # in two passes, of which the second is narrower
    for rows in (1, 2, 5, 1, 17):
        tree = random_tree(rows)
        one, other = (session.forward(tree) for session in sessions)
        np.testing.assert_array_equal(one.logits, other.logits)
        np.testing.assert_array_equal(one.hidden, other.hidden)
        for session in sessions:
            session.commit([0])
    for session in sessions:
        session.rollback(40)
        session.prefill(text[300:])  # the cache grows, so that all is bound again
    chain = TokenTree.chain(text[0], text[1:4])
    one, other = (session.forward(chain) for session in sessions)
    np.testing.assert_array_equal(one.logits, other.logits)
    for model in models:
        model.close()


def test_a_window_is_made_in_every_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_tree: RandomTree
) -> None:
    """It is no stream, which has another shape."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    source = open_checkpoint(families.write_hf("gemma3", tmp_path / "hf"))
    options = ExportOptions("fp32", check=False)
    OnnxExporter().export(source, tmp_path / "out", options, lambda what, part: None)
    bundle = open_bundle(tmp_path / "out")
    assert bundle.config.windows == (8,)
    found = []
    for model in (opened(bundle), whole(bundle)):
        session = model.open_session()
        session.prefill(list(range(30)))
        found.append(session.forward(random_tree(9)).logits.copy())
        model.close()
    np.testing.assert_array_equal(*found)


def test_an_interrupted_pass_ends_in_any_segment(export: Export, tokens: Tokens) -> None:
    model = opened(export())
    session = model.open_session()
    session.prefill(tokens(5))
    session.interrupt()
    with pytest.raises(SessionError, match="failed on 2 rows"):
        session.forward(TokenTree.chain(1, []))
    model.close()


def _changed(bundle: Bundle, name: str, change: Callable[[Any], object]) -> Bundle:
    """As if it had been written so."""
    graph = onnx.load(bundle.file(name), load_external_data=False)
    change(graph.graph)
    bundle.file(name).write_bytes(graph.SerializeToString())
    manifest = json.loads((bundle.path / MANIFEST).read_text())
    entry = list_files(bundle.path, bundle.path / name)[name]
    manifest["files"][name] = entry.model_dump()
    (bundle.path / MANIFEST).write_text(json.dumps(manifest))
    return open_bundle(bundle.path)


def _widens_stream(graph: Any) -> None:
    stream = next(value for value in graph.input if "layers" in value.name)
    stream.type.tensor_type.shape.dim[2].dim_param = "any"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_widens_stream, "do not follow each other"),
        (lambda graph: graph.ClearField("node"), "cannot load .*segment.1.onnx"),
    ],
    ids=["another shape", "no nodes"],
)
def test_segments_that_do_not_fit_are_refused_in_one_line(
    change: Callable[[Any], object], said: str, copy: Bundle
) -> None:
    with pytest.raises(BundleError, match=said) as caught:
        opened(_changed(copy, "segment.1.onnx", change))
    assert "\n" not in str(caught.value)
