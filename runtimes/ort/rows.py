"""Replaces onnxruntime's integer products on the CPU by our kernels for few rows. If they do not
fit, onnxruntime stays as it is, and one line says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper

from edge_spec.runtimes.llamacpp.rows import library
from edge_spec.runtimes.llamacpp.rows.install import refusal

DOMAIN, OPERATOR = "edge_spec", "MatMulRows"
_REPLACED = "MatMulNBits"
_ACCURACY_INT8 = 4  # rounds activations to 8 bits, as ours do
_BLOCK = 32  # values in a block of our kernels
_WEIGHT, _SCALES, _ZERO_POINTS, _GROUP_INDEX = range(1, 5)  # inputs
_in_memory = count()  # number of the next model without a file


class RowsGraph(NamedTuple):
    """A graph with our products. num_left: nodes whose blocks our kernels lack."""

    model: bytes
    num_replaced: int
    num_left: int


def rows_graph(source: Path | bytes, folder: Path | None, threads: int) -> RowsGraph:
    """Replace products in a graph file in `folder`, or a graph made from one. folder: None for
    weights in memory."""
    if isinstance(source, bytes):
        model = onnx.load_model_from_string(source)
        origin = folder
    else:
        model = onnx.load(str(source), load_external_data=False)
        origin = source
    found = list(_products(model.graph))
    weights = {each.name: each for each in _initializers(model.graph)}
    replaced = [node for node in found if _is_known(node, weights)]
    unshared = f"in memory {next(_in_memory)}"
    for node in replaced:
        weight = weights[node.input[_WEIGHT]]
        places = {each.key: each.value for each in weight.external_data}
        file = folder / places["location"] if folder and "location" in places else origin
        # Sessions share a file's packed weights; a rewritten file is another.
        name = _identity(file) if file is not None else unshared
        _replace(node, name, f"{weight.name} {places.get('offset', '')}", threads)
    if replaced:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return RowsGraph(bytes(model.SerializeToString()), len(replaced), len(found) - len(replaced))


def _identity(file: Path) -> str:
    state = file.stat()
    return f"{file} {state.st_dev} {state.st_ino} {state.st_size} {state.st_mtime_ns}"


def _products(graph: GraphProto) -> Iterator[NodeProto]:
    for part in _parts(graph):
        yield from (node for node in part.node if node.op_type == _REPLACED)


def _initializers(graph: GraphProto) -> Iterator[TensorProto]:
    for part in _parts(graph):
        yield from part.initializer


def _parts(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _parts(attribute.g)


def _is_known(node: NodeProto, weights: dict[str, TensorProto]) -> bool:
    settings = {each.name: each.i for each in node.attribute}
    bits, block = settings.get("bits", 4), settings.get("block_size", 0)
    inputs = [*node.input, "", "", ""]
    types = [weights[name].data_type if name in weights else None for name in inputs[:4]]
    zero_points = (None, TensorProto.UINT8) if inputs[_ZERO_POINTS] else (None, None)
    return (
        settings.get("accuracy_level") == _ACCURACY_INT8
        and bits in (4, 8)
        and block > 0
        and block % _BLOCK == 0
        and settings["K"] % block == 0
        and types == [None, TensorProto.UINT8, TensorProto.FLOAT, zero_points[1]]
        and not (bits == 8 and inputs[_ZERO_POINTS])
        and not inputs[_GROUP_INDEX]
    )


def _replace(node: NodeProto, weights: str, matrix: str, threads: int) -> None:
    node.op_type, node.domain = OPERATOR, DOMAIN
    settings = {each.name: each.i for each in node.attribute}
    del node.attribute[:]
    given = {
        "N": settings["N"],
        "K": settings["K"],
        "bits": settings.get("bits", 4),
        "block_size": settings["block_size"],
        "threads": threads,
        "weights": weights,
        "matrix": matrix,
    }
    node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())


_log = logging.getLogger(__name__)


def wanted() -> str:
    """Return the kernels and build for bundles here; "" for none. Raises UsageError as `refusal`
    does."""
    return library.build_name() if refusal() is None else ""


def description() -> str:
    reason = refusal()
    return f"rows: {library.table()}" if reason is None else f"rows: off, {reason}"


class OwnProducts:
    """Gives our kernels to all graphs of a bundle or head, or to none, since rows of the two
    differ. suits: whether they may compute at all."""

    def __init__(self, suits: bool = True) -> None:
        self._suits = suits
        self._reason = refusal() if suits else ""  # why none of them; None: they compute
        self._lock = Lock()  # graphs may load concurrently
        self._num_replaced = self._num_left = 0
        self._is_settled = False  # a graph was loaded with our kernels

    @property
    def description(self) -> str | None:
        """The kernels in one line; None if they do not suit."""
        if not self._suits:
            return None
        if self._reason is not None:
            return f"rows: off, {self._reason}"
        if not self._num_replaced:
            return "rows: off, there are no kernels for its types"
        left = f", not {self._num_left}" if self._num_left else ""
        return f"rows: {library.table()}, {self._num_replaced} matrices{left}"

    def load(
        self,
        graph: Path | bytes,
        folder: Path | None,
        threads: int,
        make_options: Callable[[Path | None], Any],
        load: Callable[[Path | bytes, Any], Any],
    ) -> Any:
        """Load a graph, with our operator if it fits. folder: see `rows_graph`; make_options: takes
        it for a graph in memory, else None. Raises what `load` does."""
        if self._reason is None:
            try:
                made = rows_graph(graph, folder, threads)
                if isinstance(graph, Path):  # do not count graphs made from it
                    with self._lock:
                        self._num_replaced += made.num_replaced
                        self._num_left += made.num_left
                if made.num_replaced:
                    options = make_options(folder)
                    register(options)
                    session = load(made.model, options)
                    with self._lock:
                        self._is_settled = True
                    return session
            except Exception as error:
                with self._lock:
                    if self._is_settled:
                        raise
                    self._reason = " ".join(str(error).split())
                _log.info("onnxruntime computes by itself: %s", self._reason)
        return load(graph, make_options(folder if isinstance(graph, bytes) else None))


def register(options: Any) -> None:
    """Register our operator. Raises onnxruntime's errors."""
    library.library()  # keeps it loaded without sessions
    options.register_custom_ops_library(str(library.path()))
