"""Sessions that keep keys and values on a device, run here on the CPU's: the same code, whose
copies to and from the device are counted at onnxruntime's own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import astuple, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest

from edge_spec.control.policy import FixedPolicy
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions, SelfDrafting, Session
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
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.ort import OrtModel
from edge_spec.runtimes.ort.device_memory import DeviceMemory
from edge_spec.runtimes.ort.device_place import Place, place_of
from edge_spec.runtimes.ort.device_session import DeviceSession
from edge_spec.runtimes.ort.devices import ProviderChoice
from edge_spec.runtimes.ort.graph_forms import GraphForm
from edge_spec.storage.atomic import CACHE_VARIABLE
from edge_spec.testing import check_session

CONTEXT = 1024
HERE = Place("cpu", 0)
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # of two forms
HALF = GraphForm(is_half=True, is_attended_once=True)
# Of logits of the size of 1: sums of another order, and roundings to float16 on the way, of which
# 0.004 was seen. A wrong key or position makes differences of the size of the logits.
FLOAT32, FLOAT16 = 1e-3, 0.05

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


Opened = Callable[..., OrtModel]


@pytest.fixture(scope="module")
def opened(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """opened(form=None, place=HERE, context=None, quantization="fp32"): on one thread."""
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
        form: GraphForm | None = None,
        place: Place | None = HERE,
        context: int | None = None,
        quantization: str = "fp32",
    ) -> OrtModel:
        options = RuntimeOptions(threads=1, context_length=context)
        return OrtModel(bundle(quantization), options, form, place)

    return open_model


@pytest.fixture(scope="module")
def model(opened: Opened) -> OrtModel:
    """In the forms that a GPU runs, with one for chains."""
    return opened(HALF)


@pytest.fixture
def session(model: OrtModel) -> Iterator[Any]:
    with closing(model.open_session()) as session:
        yield session


class Recorder:
    """Counts the bytes of arrays that cross between numpy and onnxruntime, at its own calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given = self.allocated = 0
        bind, value = onnxruntime.IOBinding.bind_cpu_input, onnxruntime.OrtValue
        allocate = value.ortvalue_from_shape_and_type

        def bound(binding: Any, name: str, array: np.ndarray) -> None:
            self.given += array.nbytes
            bind(binding, name, array)

        def allocated(shape: Any, kind: Any, *place: Any) -> Any:
            made = allocate(shape, kind, *place)
            self.allocated += made.tensor_size_in_bytes()
            return made

        def refused(*_: object) -> None:
            raise AssertionError("copies, and is not counted")

        monkeypatch.setattr(onnxruntime.IOBinding, "bind_cpu_input", bound)
        monkeypatch.setattr(value, "ortvalue_from_shape_and_type", allocated)
        for name in ("numpy", "update_inplace"):
            monkeypatch.setattr(value, name, refused)


@pytest.fixture
def recorder(model: OrtModel, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def moved_by(session: Any, recorder: Recorder, act: Callable[[], object]) -> dict[str, int]:
    """What an act allocates, binds and copies, as the session counts it and as it is recorded."""
    traffic = session.traffic
    before, seen = astuple(traffic), (recorder.given, recorder.allocated)
    act()
    names = ("allocated", "bound", "to_device", "to_host", "on_device")
    after = zip(names, astuple(traffic), before, strict=True)
    found = {name: now - then for name, now, then in after}
    assert found["to_device"] == recorder.given - seen[0]
    assert found["allocated"] == recorder.allocated - seen[1]
    return found


def test_what_a_chain_copies_grows_with_its_rows_and_not_with_the_text(
    model: OrtModel, session: Any, recorder: Recorder, tokens: Tokens
) -> None:
    config, found = model.config, []
    for length in (20, 400):  # the cache does not grow in between
        session.prefill(tokens(length - session.length))
        chain = TokenTree.chain(1, tokens(5))
        session.forward(chain)  # binds the width
        found.append(moved_by(session, recorder, partial(session.forward, chain)))
    a_row = 2 * (config.vocab_size + config.hidden_size)
    expected = {"allocated": 0, "bound": 0, "to_host": 6 * a_row, "on_device": 0}
    for each in found:
        assert each.pop("to_device") == 6 * 2 * 8 + 4 + 4  # tokens and positions, two lengths
        assert each == expected


def test_where_a_device_has_no_addresses_each_pass_copies_the_cache_anew(
    opened: Opened, tokens: Tokens
) -> None:
    """What is bound is copied when it is bound: a binding that is used again reads the keys of the
    pass that it was made for."""
    with closing(opened(HALF, Place("cpu", 0, is_copied=True)).open_session()) as session:
        session.prefill(tokens(20))
        traffic, a_cache = session.traffic, session.state()["kv"].nbytes // 20 * 512
        for _ in range(2):
            before = astuple(traffic)
            session.forward(TokenTree.chain(1, [2]))
            _, bound, given, read, _ = np.subtract(astuple(traffic), before)
            assert bound == a_cache < min(given, read)


def test_a_prompt_brings_no_scores_back(session: Any, recorder: Recorder, tokens: Tokens) -> None:
    moved = moved_by(session, recorder, lambda: session.prefill(tokens(300)))
    assert moved["to_host"] == 0
    assert moved["to_device"] < 300 * 4 * 8  # tokens, positions and indices


def test_a_tree_copies_its_own_mask_and_its_commit_no_keys(
    model: OrtModel, session: Any, recorder: Recorder, tokens: Tokens, random_tree: RandomTree
) -> None:
    config = model.config
    session.prefill(tokens(300))
    tree = random_tree(8)
    path = max((tree.path(row) for row in range(8)), key=lambda path: path[-1] - len(path))
    session.forward(tree)
    scored = moved_by(session, recorder, lambda: session.forward(tree))
    assert scored["to_device"] < 8 * 2 * 8 + 8 * 8 * 2 + 100  # and a few numbers
    assert scored["allocated"] == scored["on_device"] == 8 * 308 * 2  # the whole mask, made there
    kept = moved_by(session, recorder, lambda: session.commit(path))
    still = sum(row == at for at, row in enumerate(path))
    a_token = 2 * config.num_layers * config.kv_size * 2
    assert kept["to_host"] == kept["allocated"] == 0
    assert kept["on_device"] == (len(path) - still) * a_token > 0
    assert kept["to_device"] == (len(path) - still) * 8 + 8  # which rows, and where they go


def test_a_chain_is_committed_by_its_length_alone(
    session: Any, recorder: Recorder, tokens: Tokens
) -> None:
    session.prefill(tokens(20))
    session.forward(TokenTree.chain(1, tokens(5)))
    for act in (lambda: session.commit(range(4)), lambda: session.rollback(21)):
        assert set(moved_by(session, recorder, act).values()) == {0}
    assert session.length == 21


def test_a_state_is_read_and_written_once(
    model: OrtModel, opened: Opened, recorder: Recorder, tokens: Tokens, scores: Any
) -> None:
    """It is also that of a session in main memory, in both directions."""
    with closing(model.open_session()) as first, closing(model.open_session()) as other:
        first.prefill(tokens(50))
        states: list[dict[str, np.ndarray]] = []
        read = moved_by(first, recorder, lambda: states.append(first.state()))
        size = states[0]["kv"].nbytes
        assert read["to_host"] == size == 50 * 2 * model.config.num_layers * 256 * 2
        other.prefill(tokens(10, seed=1))
        written = moved_by(other, recorder, lambda: other.restore(states[0], 50))
        assert size <= written["to_device"] <= size + 64
        expected = scores(first, tokens(4, seed=2))
        np.testing.assert_array_equal(scores(other, tokens(4, seed=2)), expected)
    with closing(opened(HALF, None).open_session()) as plain:
        plain.restore(states[0], 50)
        found = scores(plain, tokens(4, seed=2))
        np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT16)
        np.testing.assert_array_equal(plain.state()["kv"], states[0]["kv"])


def test_the_cache_doubles_and_is_copied_on_the_device(
    model: OrtModel, session: Any, recorder: Recorder, tokens: Tokens
) -> None:
    a_token = 2 * model.config.num_layers * model.config.kv_size * 2
    session.prefill(tokens(500))
    grown = moved_by(session, recorder, lambda: session.prefill(tokens(30)))
    assert grown["allocated"] == grown["on_device"] == 1024 * a_token
    assert grown["to_host"] == 0
    assert grown["to_device"] < 30 * 100  # of a token of the cache there are 2,048 bytes


def test_rows_that_are_gone_cannot_be_committed(session: Any, tokens: Tokens) -> None:
    session.prefill(tokens(8))
    for between in (lambda: None, lambda: session.prefill([1]), lambda: session.rollback(4)):
        session.forward(TokenTree.chain(1, [2]))
        session.commit([0])
        with pytest.raises(ValueError, match="cannot be kept"):
            session.commit([1])
        session.forward(TokenTree.chain(1, [2]))
        between()
        if session._scored == 0:
            with pytest.raises(ValueError, match="cannot be kept"):
                session.commit([0])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CUDA failure 2: out of memory", DeviceMemoryError),
        ("CUDA failure 700: an illegal memory access was encountered", SessionError),
    ],
)
@pytest.mark.parametrize("act", ["forward", "prefill", "commit", "state", "restore"])
def test_a_device_that_fails_is_told_in_one_line_and_the_session_closes(
    act: str,
    said: str,
    told: type[Exception],
    model: OrtModel,
    tokens: Tokens,
    random_tree: RandomTree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = model.open_session()
    session.prefill(tokens(20))
    tree = random_tree(6)
    path = max((tree.path(row) for row in range(6)), key=lambda path: path[-1] - len(path))
    session.forward(tree)
    state = session.state()
    session.forward(tree)

    def fails(*_: object) -> None:
        raise RuntimeError(f"{said}\n in some file")

    acts: dict[str, Callable[[], object]] = {
        "forward": lambda: session.forward(tree),
        "prefill": lambda: session.prefill(tokens(5)),
        "commit": lambda: session.commit(path),
        "state": lambda: session.state(),
        "restore": lambda: session.restore(state, 20),
    }
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime.InferenceSession, "run_with_iobinding", fails)
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
        patched.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", no_memory)
        with pytest.raises(DeviceMemoryError):
            session.prefill(tokens(10))
    assert session.length == 510
    np.testing.assert_array_equal(scores(session, [1, 2]), expected)


def test_sessions_of_one_model_run_at_the_same_time(
    model: OrtModel, tokens: Tokens, random_tree: RandomTree
) -> None:
    """They share the graphs that copy; each has buffers of its own."""

    def scored(seed: int) -> np.ndarray:
        with closing(model.open_session()) as session:
            session.prefill(tokens(40, seed))
            for step in range(10):
                tree = random_tree(6, 10 * seed + step)
                logits = session.forward(tree).logits.copy()
                session.commit(tree.path(5))
            return logits

    alone = [scored(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(scored, range(2)))
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_engine_writes_the_same_with_drafts_and_without(
    hf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of lookups and chains of a draft model, on sessions that are copied and restored."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("edge_spec.runtimes.ort.graph_loader.place_of", lambda chosen: HERE)
    options = LoadOptions(runtime="ort", quantization="fp32", drafter="none", threads=1)
    drafting = {"draft": (str(hf()),), "draft_threads": 1}
    prompt, texts = [5, 9, 5, 9, 7, 5, 9], {}
    for name in ("none", "lookahead", "draft-model"):
        chosen = replace(options, drafter=name, **(drafting if name == "draft-model" else {}))
        with load_engine(str(hf()), chosen, lambda what, fraction: None) as engine:
            assert isinstance(engine._session, DeviceSession)
            if name != "none":  # whether or not it pays on this machine
                policy = FixedPolicy()
                engine._drafting.speculation = replace(engine._drafting.speculation, policy=policy)
            result = engine.generate(prompt, max_tokens=40)
            texts[name] = [token.id for token in result.tokens]
            assert name == "none" or result.stats.draft_n > 0
            with pytest.raises(UnsupportedModelError, match="ort on the CPU"):
                engine.set_drafter("early-exit")
    assert texts["none"] == texts["lookahead"] == texts["draft-model"]


def test_a_form_for_chains_alone_is_loaded_once_and_takes_no_branches(
    opened: Opened, random_tree: RandomTree
) -> None:
    form = replace(HALF, takes_trees=False)
    model = opened(form, context=48)
    assert not model.capabilities.trees
    check_session(model, FLOAT16)
    with closing(model.open_session()) as session:
        assert session._passes._trees is session._passes._chains
        with pytest.raises(ValueError, match="chains alone"):
            session.forward(random_tree(6))


def test_it_has_no_parts_and_takes_turns(model: OrtModel, session: Session) -> None:
    assert not isinstance(session, SelfDrafting)
    assert model.prepare_sharing(4) == 1


@pytest.mark.parametrize("quantization", ["fp32", "int8"])
def test_both_forms_take_the_matrices_that_were_copied_once(
    quantization: str, opened: Opened, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And score with them what they score with those of the file."""
    given: list[dict[str, Any]] = []
    add = onnxruntime.SessionOptions.add_external_initializers

    def added(options: Any, names: list[str], values: list[Any]) -> None:
        given.append(dict(zip(names, values, strict=True)))
        add(options, names, values)

    monkeypatch.setattr(onnxruntime.SessionOptions, "add_external_initializers", added)
    chain = TokenTree.chain(1, tokens(5))
    with closing(opened(HALF, quantization=quantization).open_session()) as session:
        found = session.forward(chain).logits
    trees, chains = given
    shared = {name for name, value in trees.items() if chains.get(name) is value}
    assert sum("proj" in name for name in shared) == 2 * 4  # layers; q, k, v and gate, up
    with closing(opened(HALF, None, quantization=quantization).open_session()) as session:
        expected = session.forward(chain).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT16)


def test_the_first_device_with_memory_of_its_own_keeps_the_cache() -> None:
    second = {"device_id": "1"}
    gpu = ProviderChoice("cuda1", "CUDAExecutionProvider", "gpu", "a card", None, second)
    npu = ProviderChoice("openvino-npu", "OpenVINOExecutionProvider", "npu", "", None)
    web = ProviderChoice("webgpu", "WebGpuExecutionProvider", "gpu", "", None)
    assert place_of([npu, gpu]) == Place("cuda", 1)
    assert place_of([npu]) is None
    assert place_of([web]) == Place("cpu", 0, is_copied=True)


def test_everything_of_the_cache_is_asked_for_on_the_place(monkeypatch: Any) -> None:
    """Of a device that is not here: its name and number reach onnxruntime."""
    asked: list[Any] = []

    def no_device(shape: Any, kind: Any, *place: Any) -> None:
        asked.append(place)
        raise RuntimeError

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", no_device)
    with pytest.raises(RuntimeError):
        DeviceMemory(Place("cuda", 1), None).padded(np.zeros((1, 2, 1, 4)), (0,) * 4, (0,) * 4)  # type: ignore[arg-type]
    assert asked == [("cuda", 1)]
