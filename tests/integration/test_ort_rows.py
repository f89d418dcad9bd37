"""Our kernels for few rows as an operator of onnxruntime: what it computes, and what becomes of
graphs, bundles and settings that it does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.llamacpp.rows import install, library
from edge_spec.runtimes.ort import OrtRuntime, rows
from edge_spec.runtimes.ort.growing import GrowingModel
from edge_spec.runtimes.ort.rows import rows_graph

Exported = Callable[..., Bundle]
_OUTPUTS, _VALUES = 40, 384  # no multiple of a tile's rows; an odd number of blocks of 128


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(install.VARIABLE, raising=False)
    reason = install.refusal()
    if reason is not None:
        pytest.skip(f"{reason}: there is nothing to test")


class Matrix:
    """A matrix of random blocks, and the graph of a product with it."""

    def __init__(
        self, bits: int = 4, block: int = 32, zero_points: bool = False, bias: bool = False
    ) -> None:
        random = np.random.default_rng(7)
        num_blocks = _VALUES // block
        self.block = block
        self.integers = random.integers(0, 1 << bits, (_OUTPUTS, num_blocks, block), np.uint8)
        self.scales = random.uniform(0.002, 0.02, (_OUTPUTS, num_blocks)).astype(np.float32)
        self.zeros = np.full((_OUTPUTS, num_blocks), 1 << (bits - 1), np.uint8)
        if zero_points:
            self.zeros = random.integers(0, 1 << bits, self.zeros.shape, np.uint8)
        self.bias = random.uniform(-1, 1, _OUTPUTS).astype(np.float32) if bias else None
        self.settings = {"K": _VALUES, "N": _OUTPUTS, "bits": bits, "block_size": block}
        self.bits, self.has_zeros = bits, zero_points

    def graph(self, **changed: int) -> ModelProto:
        packed, zeros = self.integers, self.zeros
        if self.bits == 4:
            packed = packed[..., 0::2] | packed[..., 1::2] << 4
            padded = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
            zeros = padded[:, 0::2] | padded[:, 1::2] << 4
        weights = {"weight": packed, "scales": self.scales.ravel()}
        inputs = ["x", "weight", "scales"]
        if self.has_zeros:
            weights["zeros"] = zeros.ravel()
            inputs.append("zeros")
        if self.bias is not None:
            weights["bias"] = self.bias
            inputs += [""] * (5 - len(inputs)) + ["bias"]
        settings = {**self.settings, "accuracy_level": 4, **changed}
        node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **settings)
        graph = helper.make_graph(
            [node],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "rows", _VALUES])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "rows", _OUTPUTS])],
            [numpy_helper.from_array(each, name) for name, each in weights.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def product(self, x: np.ndarray) -> np.ndarray:
        """In float64."""
        values = self.integers.astype(np.float64) - self.zeros[..., None]
        weight = (values * self.scales[..., None]).reshape(_OUTPUTS, _VALUES)
        found: np.ndarray = x.astype(np.float64) @ weight.T
        return found if self.bias is None else found + self.bias


def changed(model: ModelProto, folder: Path, threads: int = 1) -> bytes:
    """The graph with our operator."""
    made = rows_graph(model.SerializeToString(), folder, threads)
    assert made.num_replaced == 1
    return made.model


def opened(model: bytes, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    rows.register(options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(session: Any, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = session.run(None, {"x": x[None]})[0][0]
    return found


def activations(count: int = 136) -> np.ndarray:
    """With a few large ones, as models have them."""
    random = np.random.default_rng(3)
    x = random.standard_normal((count, _VALUES)).astype(np.float32)
    x[:, ::37] *= 8
    return x


KINDS = {
    "int4": Matrix(),
    "zero points and a bias": Matrix(zero_points=True, bias=True),
    "an odd number of large blocks": Matrix(block=128, zero_points=True),
    "int8": Matrix(bits=8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_as_near_to_exact_ones_as_onnxruntimes_own(kind: str, tmp_path: Path) -> None:
    """Both round activations to int8, ours in blocks of 32: their errors are of one size. Ours
    also keeps scales as float16, which adds less than a tenth. A wrong nibble, zero point or scale
    would make the error a hundred times larger."""
    matrix, x = KINDS[kind], activations()
    exact = matrix.product(x)
    ours = run(opened(changed(matrix.graph(), tmp_path)), x)
    stock = run(opened(matrix.graph().SerializeToString()), x)

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.mean((found - exact) ** 2)))

    assert error(ours) < 1.1 * error(stock)
    assert error(ours) < 0.02 * np.std(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_in_passes_of_any_width_on_any_number_of_threads(
    kind: str, tmp_path: Path
) -> None:
    """Widths 1 to 16, and one of a prompt."""
    model, x = KINDS[kind].graph(), activations()
    alone = opened(changed(model, tmp_path))
    single = np.concatenate([run(alone, row[None]) for row in x])
    for threads in (1, 2, 3, 4):
        session, at = opened(changed(model, tmp_path, threads), threads), 0
        for width in range(1, 17):
            found = run(session, x[at : at + width])
            np.testing.assert_array_equal(found, single[at : at + width])
            at += width
        np.testing.assert_array_equal(run(session, x), single)


@pytest.mark.parametrize(
    "model",
    [
        Matrix().graph(accuracy_level=0),  # activations as floats
        Matrix(block=16).graph(),
        Matrix(bits=8, zero_points=True).graph(),
        Matrix(bits=8).graph(K=_VALUES - 8),  # half a block
    ],
    ids=["accuracy", "block", "zero points of 8 bits", "half a block"],
)
def test_other_nodes_stay_as_they_are(model: ModelProto, tmp_path: Path) -> None:
    made = rows_graph(model.SerializeToString(), tmp_path, 1)
    assert (made.num_replaced, made.num_left) == (0, 1)
    assert made.model == model.SerializeToString()


def test_sessions_over_one_file_share_what_is_packed_of_it(tmp_path: Path) -> None:
    """Seen by giving the second one another matrix under the first one's name."""
    first, other, x = Matrix(), Matrix(zero_points=True), activations(3)
    holder = opened(changed(first.graph(), tmp_path))
    expected = run(holder, x)
    again = opened(changed(other.graph(), tmp_path))
    np.testing.assert_array_equal(run(again, x), expected)
    os.utime(tmp_path, ns=(0, 0))  # another state of its file
    later = opened(changed(other.graph(), tmp_path))
    assert not np.array_equal(run(later, x), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N": 2 * _OUTPUTS}, "other sizes"),
        ({"K": 2 * _VALUES}, "other sizes"),
        ({"K": 1 << 62}, "does not take"),
        ({"N": -1}, "does not take"),
        ({"threads": 0}, "does not take"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(
    change: dict[str, int], message: str, tmp_path: Path
) -> None:
    model = onnx.load_model_from_string(changed(Matrix().graph(), tmp_path))
    for attribute in model.graph.node[0].attribute:
        if attribute.name in change:
            attribute.i = change[attribute.name]
    with pytest.raises(Exception, match=message):
        opened(model.SerializeToString())


@pytest.mark.parametrize("scale", [1e-6, 7e4, np.inf])
def test_scales_beyond_float16_are_refused(scale: float, tmp_path: Path) -> None:
    matrix = Matrix()
    matrix.scales[:] = scale
    with pytest.raises(Exception, match="scales do not fit float16"):
        opened(changed(matrix.graph(), tmp_path))


def scores(bundle: Bundle, threads: int = 1) -> tuple[np.ndarray, str | None]:
    model = OrtRuntime().open(bundle, RuntimeOptions(threads=threads))
    assert not isinstance(model, GrowingModel)
    tokens = list(range(3, 43))
    session = model.open_session()
    session.prefill(tokens[:32])
    found = session.forward(TokenTree.chain(tokens[32], tokens[33:])).logits.copy()
    session.close()
    model.close()
    return found, model.capabilities.kernels


def test_a_bundle_gets_them_and_stays_as_it_is(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = exported("llama", "int4")
    before = {file: file.read_bytes() for file in bundle.path.iterdir()}
    ours, line = scores(bundle)
    assert line is not None and line.startswith(f"rows: {library.table()}, ")
    assert before == {file: file.read_bytes() for file in bundle.path.iterdir()}
    monkeypatch.setenv(install.VARIABLE, "off")
    stock, line = scores(bundle)
    assert line == "rows: off, EDGE_SPEC_ROWS=off"
    # Activations are rounded in both, where one may fall the other way and change later ones.
    assert np.std(ours - stock) < 0.1 * np.std(stock)
    assert not np.array_equal(ours, stock)


def test_what_does_not_load_leaves_onnxruntime_as_it_is(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(*_: Any) -> None:
        raise RuntimeError("undefined symbol: no_such_function")

    bundle = exported("llama", "int4")
    monkeypatch.setattr(rows, "register", register)
    found, line = scores(bundle)
    assert line == "rows: off, undefined symbol: no_such_function"
    monkeypatch.setenv(install.VARIABLE, "off")
    np.testing.assert_array_equal(found, scores(bundle)[0])
