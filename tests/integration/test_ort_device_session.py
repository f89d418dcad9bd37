"""Sessions that keep keys and values on a device, run here on the CPU's: the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import (
    DeviceMemoryError,
    SessionError,
    UnsupportedModelError,
)
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader import load_engine
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.layer_selection import ChosenPart
from edge_spec.runtimes.ort import opening
from edge_spec.runtimes.ort.caches import Place
from edge_spec.runtimes.ort.graph_forms import FLOAT32, GraphForm
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.runtimes.ort.session import HostSession
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.silence import quiet

CONTEXT = 1024
HERE = Place("cpu", 0)
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # of two forms
HALF = GraphForm(is_half=True)


Tokens = Callable[..., list[int]]


Opened = Callable[..., OrtModel]


@pytest.fixture(scope="module")
def opened(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """opened(form=FLOAT32, context=None, quantization="fp32"): on one thread."""
    directory = tmp_path_factory.mktemp("device")
    made = tiny.build("llama-llama3", max_position_embeddings=CONTEXT + 1, **SHAPE)
    source = open_checkpoint(tiny.write_hf(made, directory / "model"))

    @cache
    def bundle(quantization: str) -> Bundle:
        out = directory / quantization
        options = ExportOptions(quantization, check=False)
        OnnxExporter().export(source, out, options, lambda what, part: None)
        return open_bundle(out)

    def open_model(
        form: GraphForm = FLOAT32,
        context: int | None = None,
        quantization: str = "fp32",
    ) -> OrtModel:
        options = RuntimeOptions(threads=1, context_length=context)
        return OrtModel(bundle(quantization), options, form, HERE)

    return open_model


@pytest.fixture(scope="module")
def model(opened: Opened) -> OrtModel:
    """In the form that a GPU runs."""
    return opened(HALF)


@pytest.fixture
def session(model: OrtModel) -> Iterator[Any]:
    with closing(model.open_session()) as session:
        yield session


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CUDA failure 2: out of memory", DeviceMemoryError),
        ("CUDA failure 700: an illegal memory access was encountered", SessionError),
    ],
)
@pytest.mark.parametrize("act", ["forward", "prefill", "state", "restore"])
def test_a_device_that_fails_is_told_in_one_line_and_the_session_closes(
    act: str,
    said: str,
    told: type[Exception],
    model: OrtModel,
    tokens: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = model.open_session()
    session.prefill(tokens(20))
    tree = TokenTree.chain(5, tokens(5))
    session.forward(tree)
    state = session.state()
    session.forward(tree)

    def fails(*_: object) -> None:
        raise RuntimeError(f"{said}\n in some file")

    acts: dict[str, Callable[[], object]] = {
        "forward": lambda: session.forward(tree),
        "prefill": lambda: session.prefill(tokens(5)),
        "state": lambda: session.state(),
        "restore": lambda: session.restore(state, 20),
    }
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime.InferenceSession, "run_with_iobinding", fails)
        patched.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", fails)
        patched.setattr(onnxruntime.OrtValue, "numpy", fails)
        with pytest.raises(told, match="CUDA failure") as caught:
            acts[act]()
    assert type(caught.value) is told
    assert "\n" not in str(caught.value)
    assert session.length == 20
    session.close()


def test_a_cache_that_cannot_grow_stays_as_it_was(
    session: Any, tokens: Tokens, scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.prefill(tokens(510))
    expected = scores(session, [1, 2])

    def no_memory(*_: object) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 1")

    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", no_memory)
        with pytest.raises(DeviceMemoryError):
            session.prefill(tokens(10))
    assert session.length == 510
    np.testing.assert_array_equal(scores(session, [1, 2]), expected)


def test_a_full_context_has_room_for_the_second_row_of_a_single_one(
    opened: Opened, tokens: Tokens, scores: Any
) -> None:
    with closing(opened(context=40).open_session()) as session:
        session.prefill(tokens(39))
        scores(session, [1])
        assert session.cache.capacity == 41


def test_sessions_of_one_model_run_at_the_same_time(model: OrtModel, tokens: Tokens) -> None:
    """Each has buffers of its own."""

    def scored(seed: int) -> np.ndarray:
        with closing(model.open_session()) as session:
            session.prefill(tokens(40, seed))
            for step in range(10):
                tree = TokenTree.chain(5, tokens(5, 10 * seed + step))
                logits = session.forward(tree).logits.copy()
                session.commit(range(3))
            return logits

    alone = [scored(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(scored, range(2)))
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_engine_writes_the_same_with_drafts_and_without(
    hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of lookups and of a draft model, on sessions that are copied and restored."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(
        opening,
        "_open",
        lambda bundle, options, form=None: OrtModel(bundle, options, FLOAT32, HERE),
    )
    options = LoadOptions(runtime="ort", drafter="none", threads=1)
    plan = ModelPlan(Source(str(hf()), quiet), "ort", export=ExportOptions("fp32"))
    model = str(plan.prepare(quiet).source.path)
    drafting = {"draft": (str(hf()),), "draft_threads": 1}
    prompt, texts = [5, 9, 5, 9, 7, 5, 9], {}
    for name in ("none", "suffix", "draft-model"):
        chosen = replace(options, drafter=name, **(drafting if name == "draft-model" else {}))
        with load_engine(model, chosen, quiet) as engine:
            assert not isinstance(engine._session, HostSession)
            if name != "none":  # whether or not it pays on this machine
                policy = FixedPolicy(branches=False, probes=False)
                engine._drafting.speculation = replace(engine._drafting.speculation, policy=policy)
            result = engine.generate(prompt, max_tokens=40)
            texts[name] = [token.id for token in result.tokens]
            assert name == "none" or result.stats.draft_n > 0
            parts: Any = engine.parts.speculation_factory.setting.parts
            parts["early-exit"] = ChosenPart(1)
            with pytest.raises(UnsupportedModelError, match="ort on the CPU"):
                engine.set_drafter("early-exit")
    assert texts["none"] == texts["suffix"] == texts["draft-model"]
