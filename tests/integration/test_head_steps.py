"""What computes a head's steps: how near it is to float32, and what is kept of it."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_spec.core.heads import (
    FLOAT_BITS,
    WEIGHTS_FILE,
    ComputesHeads,
    HeadMatrix,
    MedusaHead,
    StoredStep,
)
from edge_spec.drafters.heads.layers import FloatProducts, Heads, attend
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.errors import ModelFileError
from edge_spec.exporters.heads.graph_parts import HeadGraph
from edge_spec.exporters.onnx.graph import tensor
from edge_spec.loader.head import StoredBackend, head_backend
from edge_spec.models import runtimes
from edge_spec.storage.atomic import CACHE_VARIABLE

OUT, IN, COUNT = 96, 64, 3
FILES = ("step.onnx", WEIGHTS_FILE, "sums.json")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "heads"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def medusa(path: Path, num_blocks: int = 1, shared: bool = False) -> MedusaHead:
    """Random heads; some have an output matrix each, read in two parts."""
    random = np.random.default_rng(0)

    def output() -> HeadMatrix:
        parts = [random.standard_normal((OUT // 2, IN), np.float32) for _ in range(2)]
        return HeadMatrix(tuple(partial(np.asarray, part) for part in parts), is_output=True)

    def block() -> tuple[np.ndarray, np.ndarray]:
        weight = random.standard_normal((IN, IN), np.float32) * np.float32(0.2)
        return weight, random.standard_normal(IN).astype(np.float32)

    blocks = tuple(tuple(block() for _ in range(num_blocks)) for _ in range(COUNT))
    outputs = tuple(output() for _ in range(1 if shared else COUNT))
    ids = np.arange(OUT) * 2 if shared else None
    return MedusaHead(path, IN, 2 * OUT if shared else OUT, COUNT, blocks, outputs, ids)


@pytest.fixture
def state() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(IN).astype(np.float32)


def runtime() -> ComputesHeads:
    found = runtimes.load_runtime("ort")
    assert isinstance(found, ComputesHeads)
    return found


@pytest.mark.parametrize("asked", [[0, 1, 2], [1], [0, 2]])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_medusa_heads_are_scored_as_by_their_formula(
    num_blocks: int, shared: bool, asked: list[int], head: Path, state: np.ndarray
) -> None:
    """1e-4 of scores around 10: float32 of sums of IN terms in another order."""
    described = medusa(head, num_blocks, shared)
    expected = MedusaNetwork(described).scores(state, asked)
    found = MedusaNetwork(described, StoredBackend(runtime(), FLOAT_BITS)).scores(state, asked)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
    np.testing.assert_array_equal(found.likeliest, expected.likeliest)
    np.testing.assert_allclose(found.shares, expected.shares, rtol=1e-3)
    assert found.likeliest.shape == (len(asked), 4)
    if shared:
        assert not (found.likeliest % 2).any()  # ids of the target


def product(matrix: HeadMatrix, bits: int, x: np.ndarray) -> np.ndarray:
    weights = io.BytesIO()
    graph = HeadGraph(weights)
    graph.multiply("x", "matrix", matrix, bits, "y")
    inputs, outputs = ([tensor(name, 1, ["rows", name + "s"])] for name in "xy")
    options, stored = onnxruntime.SessionOptions(), weights.getvalue()
    options.add_external_initializers_from_files_in_memory([WEIGHTS_FILE], [stored], [len(stored)])
    session = onnxruntime.InferenceSession(graph.serialized("product", inputs, outputs), options)
    found: np.ndarray = session.run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_as_near_as_their_bits_allow(bits: int, has_bias: bool, head: Path) -> None:
    """A weight is off by at most half of a step, 2^-bits of twice the largest of its block, some 3
    standard deviations; IN of them, and inputs of 8 bits, add up as their root does."""
    random = np.random.default_rng(1)
    bias = random.standard_normal(OUT).astype(np.float32) if has_bias else None
    matrix = HeadMatrix(medusa(head).outputs[0].parts, bias)
    inputs = random.standard_normal((5, IN)).astype(np.float32)
    off = np.abs(product(matrix, bits, inputs) - FloatProducts({"it": matrix})("it", inputs))
    bound = 6 / 2**bits + 6 / 2**8  # of a weight's and of an input's steps
    assert 0 < off.max() < bound * np.sqrt(IN)  # it was rounded
    assert product(matrix, bits, inputs[:1]).shape == (1, OUT)


def stored(described: MedusaHead, bits: int) -> StoredStep:
    """What a backend of so many bits is given."""
    found: list[StoredStep] = []

    class Keeping:
        def open_medusa_step(self, step: StoredStep, threads: int | None) -> None:
            found.append(step)

    MedusaNetwork(described, StoredBackend(Keeping(), bits))  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_output_matrices_keep_8_bits_where_it_decides(shared: bool, bits: int, head: Path) -> None:
    graph = onnx.load_from_string(stored(medusa(head, 2, shared), bits).graph).graph
    nodes = list(graph.node)
    for node in graph.node:
        nodes += [each for a in node.attribute if a.HasField("g") for each in a.g.node]
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for node in nodes:
        if node.op_type == "MatMulNBits":
            has_bits = next(a.i for a in node.attribute if a.name == "bits")
            found[node.input[1].startswith("output")].add(has_bits)
    assert found == {True: {bits}, False: {bits}}
    outputs = {node.input[1] for node in nodes if node.op_type == "MatMulNBits"}
    rows = {each.name for each in graph.initializer if each.data_type == onnx.TensorProto.INT8}
    scored_again = {f"{name}.rows" for name in outputs if name.startswith("output")}
    assert rows == (scored_again if bits == 4 else set())


@pytest.mark.parametrize("bits", [4, 8, FLOAT_BITS])
def test_a_graph_has_none_of_the_matrices_itself(bits: int, head: Path) -> None:
    """Whatever their size, the message stays far from the 2 GB at which those of protobuf end."""
    step = stored(medusa(head), bits)
    inline = [len(each.raw_data) for each in onnx.load_from_string(step.graph).graph.initializer]
    assert isinstance(step.weights, bytes)
    num_weights = COUNT * (OUT * IN + IN * IN)
    assert len(step.weights) >= num_weights * bits / 8
    assert max(inline) <= 1024 and len(step.graph) < 12_000


def test_what_was_made_once_is_read_from_the_cache(
    cache: Path, head: Path, state: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = medusa(head)

    def opened(target: str = "target") -> np.ndarray:
        return MedusaNetwork(described, head_backend(head, target, 64)).logits(state, [0, 1])

    first = opened()
    unkept = MedusaNetwork(described, head_backend(head, "target", 64, keeps=False))
    np.testing.assert_array_equal(unkept.logits(state, [0, 1]), first)

    def fail(*_: object) -> bytes:
        raise AssertionError("made again")

    monkeypatch.setattr(runtimes, "step_graph", fail)
    np.testing.assert_array_equal(opened(), first)
    with pytest.raises(AssertionError, match="made again"):  # tables of another target
        opened("other")
    (head / "config.json").write_text('{"changed": 1}')
    with pytest.raises(AssertionError, match="made again"):
        opened()
    (kept,) = (each for each in cache.iterdir() if each.is_dir())
    assert sorted(each.name for each in kept.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "missing"])
def test_a_damaged_one_is_made_again(
    name: str, damage: str, cache: Path, head: Path, state: np.ndarray
) -> None:
    def opened() -> np.ndarray:
        return MedusaNetwork(medusa(head), head_backend(head, "target", 64)).logits(state, [2])

    first = opened()
    (file,) = cache.glob(f"*/{name}")
    whole = file.read_bytes()
    at = len(whole) // 2
    if damage == "missing":
        file.unlink()
    else:
        damaged = {
            "changed": whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :],
            "cut": whole[:at],
            "empty": b"",
        }
        file.write_bytes(damaged[damage])
    np.testing.assert_array_equal(opened(), first)
    assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(
    cache: Path, head: Path, state: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("no directory")
    found = MedusaNetwork(medusa(head), head_backend(head, "target", 64)).logits(state, [0])
    assert found.shape == (1, OUT)
    assert "not kept" in caplog.text


def test_numpy_computes_where_onnxruntime_is_missing(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_spec.loader.head.find_spec", lambda name: None)
    assert head_backend(head, "target", 64) is None


def test_what_is_no_graph_is_refused_in_one_line() -> None:
    with pytest.raises(ModelFileError, match="cannot load Medusa heads") as caught:
        runtime().open_medusa_step(StoredStep(b"nothing", b""), None)
    assert caught.value.remedy == "Update onnxruntime."


def test_a_mask_of_all_is_no_mask() -> None:
    random = np.random.default_rng(0)
    queries, keys, values = (
        random.standard_normal((heads, rows, 16)).astype(np.float32)
        for heads, rows in ((4, 3), (2, 700), (2, 700))
    )
    heads_ = Heads(queries, keys, values)
    np.testing.assert_array_equal(attend(heads_, None), attend(heads_, np.ones((3, 700), bool)))
