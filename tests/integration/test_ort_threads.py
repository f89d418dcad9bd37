"""onnxruntime's graph once more, with fewer threads, for a machine that is busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.ort.model import OrtModel

Tokens = Callable[..., list[int]]


@pytest.fixture(scope="module")
def bundle(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory: Path = tmp_path_factory.mktemp("threads")
    source = open_checkpoint(tiny.write_hf(tiny.build("llama"), directory / "model"))
    options = ExportOptions("int4", check=False)
    OnnxExporter().export(source, directory / "out", options, lambda what, part: None)
    return open_bundle(directory / "out")


@pytest.fixture
def model(bundle: Bundle) -> Iterator[OrtModel]:
    opened = OrtRuntime().open(bundle, RuntimeOptions(threads=2))
    assert isinstance(opened, OrtModel)
    yield opened
    opened.close()


def opened(model: OrtModel, threads: int) -> bool:
    """Whether it is ready, once it has been waited for."""
    model.graphs.is_ready(threads)  # begins to open it
    thread = model.graphs._opening
    if thread is not None:
        thread.join()
    return model.graphs.is_ready(threads)


def test_a_session_changes_its_threads_and_no_score(model: OrtModel, tokens: Tokens) -> None:
    assert opened(model, 1)
    text = tokens(40)
    steady, changing = model.open_session(), model.open_session()
    governor: Any = changing._threads
    for session in (steady, changing):
        session.prefill(text[:10])
    for i, threads in enumerate([2, 1, 1, 2, 1, 2, 2]):
        governor.observe = lambda rows, seconds, threads=threads: _chosen(governor, threads)
        tree = TokenTree.chain(text[10 + i], text[20 : 20 + i])
        one, other = (session.forward(tree).logits for session in (steady, changing))
        assert np.array_equal(one, other)
        for session in (steady, changing):
            session.commit([0])
    bound = {inference for inference, _ in changing._bound}
    assert len(bound) == 2  # what was bound once is kept


def _chosen(governor: Any, threads: int) -> int:
    governor.threads = threads
    return threads


def test_without_memory_for_it_the_graph_stays_as_it_is(
    model: OrtModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_spec.runtimes.ort.graph_loader.free_bytes", lambda: 1000)
    assert not opened(model, 1)


def test_a_graph_with_fewer_threads_gives_the_features_that_are_asked_for(model: OrtModel) -> None:
    """One that was loaded before gives none of them."""
    assert opened(model, 1)
    session: Any = model.open_session()
    session.collect_features([1], lambda start, features: None)
    assert model.graphs.with_threads(1) is None
    assert opened(model, 1)
    given = {value.name for value in model.graphs.with_threads(1).get_outputs()}
    assert "feature.1" in given


def test_a_model_is_closed_while_the_graph_is_opened_once_more(model: OrtModel) -> None:
    model.graphs.is_ready(1)
    thread = model.graphs._opening
    assert thread is not None
    model.close()
    assert not thread.is_alive()
    assert model.graphs._slim is None
