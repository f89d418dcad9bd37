"""Models that OpenVINO computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import (
    Capabilities,
    Forward,
    RuntimeOptions,
    require_rollback,
    require_room,
)
from edge_spec.core.tree import TokenTree
from edge_spec.errors import (
    BundleError,
    DeviceError,
    EdgeSpecError,
    SessionError,
    UnsupportedModelError,
)
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.kv_cache import MAX_ROWS, PREFILL_ROWS, KvCache
from edge_spec.runtimes.openvino.graph import DOMAIN, WEIGHT, rewrite
from edge_spec.runtimes.openvino.library import core, import_openvino, reason
from edge_spec.runtimes.static.session import Interruption


class OpenVinoSession:
    """A pass leaves the keys and values of its rows with the request that ran it; a commit copies
    those of the rows that are kept into the cache. So a pass that fails changes nothing."""

    def __init__(self, compiled: Any, config: ModelConfig, device: str) -> None:
        self.length = 0
        self._config = config
        self._device = device
        self._request: Any = compiled.create_infer_request()
        self._inputs = {value.any_name for value in compiled.inputs}
        self._cache = KvCache(config, is_read_whole=True)
        self._generation = 0  # of the cache that is bound
        self._given: dict[str, np.ndarray] = {}  # the library reads them, and does not hold them
        self._scored = 0  # rows of the last pass that can still be committed
        self._interruption = Interruption()

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._config.context_length)
        for start in range(0, len(tokens), PREFILL_ROWS):
            chunk = np.asarray(tokens[start : start + PREFILL_ROWS])
            rows = len(chunk)
            sees = np.tri(rows, dtype=bool)
            self._run(chunk, np.arange(rows), sees, np.array([rows - 1]))
            self.commit(range(rows))

    def forward(self, tree: TokenTree) -> Forward:
        """Raises ContextFullError, SessionError, ValueError for more than MAX_ROWS."""
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        require_room(self.length, rows, self._config.context_length)
        self._run(tree.tokens, tree.depths, tree.ancestors, np.arange(rows))
        return Forward(self._output("logits"), self._output("hidden"))

    def commit(self, rows: Sequence[int]) -> None:
        """Raises ValueError where these are no rows of the last pass, or something followed it."""
        kept = np.asarray(rows)
        if not len(kept) or kept.max() >= self._scored:
            raise ValueError(f"rows {list(rows)} are not of the last pass, of {self._scored}")
        for name, buffer in self._cache.buffers():
            written = self._output(f"present.{name}")
            buffer[:, :, self.length : self.length + len(kept)] = written[:, :, kept]
        self.length += len(kept)
        self._scored = 0

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        self.length, self._scored = length, 0

    def state(self) -> dict[str, np.ndarray]:
        """ "kv" [layers, 2, 1, kv_heads, length, head_dim] float32."""
        return self._cache.state(self.length)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Raises ValueError, and changes nothing then."""
        self._cache.restore(state, length)
        self.length, self._scored = length, 0

    def interrupt(self) -> None:
        """Ends the pass that runs before its next operation, if the plugin can, and refuses later
        ones."""
        self._interruption.ask()

    def close(self) -> None:
        self._request = None
        self._given.clear()
        self._cache.clear()
        self._scored = 0

    def _output(self, name: str) -> Any:
        return self._request.get_tensor(name).data

    def _run(
        self, tokens: np.ndarray, depths: np.ndarray, sees: np.ndarray, scored: np.ndarray
    ) -> None:
        """One pass over rows after the cached tokens; sees: [rows, rows] bool."""
        rows = len(tokens)
        self._cache.reserve(self.length + rows, self.length)
        slots = self._cache.capacity
        bias = np.full((1, 1, rows, slots + rows), -np.inf, np.float32)
        bias[..., : self.length] = 0.0
        bias[0, 0, :, slots:][sees] = 0.0
        self._scored = 0
        self._bind_cache()
        self._give("input_ids", tokens.astype(np.int64)[None])
        self._give("position_ids", (self.length + depths).astype(np.int64)[None])
        self._give("logit_rows", scored.astype(np.int64))
        self._give("attention_bias", bias)
        if "total_sequence_length" in self._inputs:  # of windows
            self._give("total_sequence_length", np.array(slots + rows, np.int32))
        try:
            with self._interruption.ended_by(self._request.cancel):
                self._request.start_async()
                self._request.wait()
        except SessionError:  # of an interruption
            raise
        except Exception as error:  # the library's, which share no base class
            raise SessionError(
                f"openvino failed on {rows} rows at {self.length} tokens on {self._device}: "
                f"{reason(error)}",
                remedy="Try fewer rows (--draft-n-max) or another --device.",
            ) from error
        self._scored = rows

    def _give(self, name: str, values: np.ndarray) -> None:
        self._given[name] = values
        self._request.set_tensor(name, shared(values))

    def _bind_cache(self) -> None:
        if self._generation == self._cache.generation:
            return
        for name, buffer in self._cache.buffers():
            self._give(f"past.{name}", buffer)
        self._generation = self._cache.generation


def shared(values: np.ndarray) -> Any:
    """Returns a tensor over the array's own memory."""
    from openvino import Tensor

    return Tensor(values, shared_memory=True)


GRAPH_FILE = "model.onnx"
_OPERATORS = re.compile(r"[Oo]perators?[^:]*?: *([\w.,;\- ]+)")
_ON_CPU: Mapping[str, str | int | bool] = {
    "INFERENCE_PRECISION_HINT": "f32",  # else it rounds to bfloat16 where the processor has that
    # Else it rounds what a matrix is multiplied with to int8. That is faster, but then the last
    # bits, which depend on where a row stands in its pass, move scores by whole steps of it.
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "ENABLE_CPU_PINNING": False,  # other models, and programs, run on the same cores
}


class OpenVinoModel:
    """One compiled model; sessions share its weights. device: a plugin's name, such as "GPU.1"."""

    def __init__(self, bundle: Bundle, options: RuntimeOptions, device: str) -> None:
        if bundle.manifest.kv_cache == "growing":
            raise UnsupportedModelError(
                f"openvino is not given bundles as optimum writes them ({bundle.path})",
                remedy="Choose --runtime ort.",
            )
        config = bundle.config
        length = min(options.context_length or config.context_length, config.context_length)
        self.config = replace(config, context_length=length)
        self.capabilities = Capabilities(
            max_rows=MAX_ROWS, trees=True, rollback=True, hidden_states=True
        )
        self.device = device
        # Constants lie where these are mapped, for as long as the model lives.
        read, self._weights = _read(bundle)
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        if device == "CPU":
            settings |= _ON_CPU
            if options.threads is not None:
                settings["INFERENCE_NUM_THREADS"] = options.threads
        try:
            self._compiled: Any = core().compile_model(read, device, settings)
        except RuntimeError as error:
            raise DeviceError(
                f"openvino cannot compile {bundle.path} for {device}: {reason(error)}",
                remedy="Choose another --device or --runtime, or update the driver.",
            ) from error

    def open_session(self) -> OpenVinoSession:
        return OpenVinoSession(self._compiled, self.config, self.device)

    def close(self) -> None:
        self._compiled = None
        self._weights = {}


def _read(bundle: Bundle) -> tuple[Any, Mapping[str, np.ndarray]]:
    """Returns openvino's model, and the mapped weights that its constants lie in.

    Raises UnsupportedModelError, BundleError."""
    import io

    path = bundle.file(GRAPH_FILE)
    made = rewrite(path, bundle.config)
    openvino = import_openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.onnx import ConversionExtension

    def weight(node: Any) -> Any:
        values = made.weights[node.get_attribute("key")]
        return openvino.op.Constant(values, shared_memory=True).outputs()

    frontend = FrontEndManager().load_by_framework("onnx")
    frontend.add_extension(ConversionExtension(WEIGHT, DOMAIN, weight))
    try:
        return frontend.convert(frontend.load(io.BytesIO(made.graph))), made.weights
    except Exception as error:  # the frontend's, which share no base class
        raise _read_error(error, bundle) from error


def _read_error(error: Exception, bundle: Bundle) -> EdgeSpecError:
    named = _OPERATORS.search(str(error))
    if named is not None:
        return UnsupportedModelError(
            f"openvino does not know operators of {bundle.path}: {named[1].strip()}",
            remedy="Choose --runtime ort.",
        )
    return BundleError(
        f"openvino cannot read {bundle.path}: {reason(error)}",
        remedy="Export the model again, or choose --runtime ort.",
    )
