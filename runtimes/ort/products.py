"""Products with the matrices of a trained head, each by a graph of one node.

A head's step is short: it costs less to call onnxruntime five times than to keep a head's cache in
a graph, and whatever a head does besides stays as its formulas are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge_spec.errors import ModelFileError
from edge_spec.runtimes.ort.devices import import_onnxruntime

_NO_SPINNING = "session.intra_op.allow_spinning"  # of threads that wait: the target needs them


class OrtProducts:
    """stored: serialized graphs `x` -> `y` by the names of their matrices."""

    def __init__(self, stored: Mapping[str, bytes], threads: int | None) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 1
        options.add_session_config_entry(_NO_SPINNING, "0")
        self._sessions = {}
        for name, graph in stored.items():
            try:
                session = onnxruntime.InferenceSession(
                    graph, options, providers=["CPUExecutionProvider"]
                )
            except Exception as error:  # onnxruntime's exceptions share no base class of their own
                raise ModelFileError(
                    f"onnxruntime cannot load the matrix {name} of a head: {error}",
                    remedy="Update onnxruntime.",
                ) from error
            self._sessions[name] = session

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        product: np.ndarray = self._sessions[name].run(None, {"x": x})[0]
        return product
