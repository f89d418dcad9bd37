"""llama.cpp's own quantizer, for the formats that choose a type for each tensor."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType, LlamaFileType

from edge_spec.core.isolated import IsolatedError, isolated, tell
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, MissingDependencyError

LIBRARY = "llama_cpp"
_TIMEOUT_S = 24 * 3600.0
_COUNTER = re.compile(r"\[ *(\d+)/ *(\d+)\]")


def require_library(name: str) -> None:
    """Raises MissingDependencyError that names the quantization `name`."""
    if find_spec(LIBRARY) is None:
        raise MissingDependencyError(
            f"quantization {name} is made by llama-cpp-python, which is not installed",
            remedy='Run: pip install "edge-spec[llamacpp]", or export with --quant Q4_0.',
        )


def quantize(
    source: Path,
    target: Path,
    file_type: LlamaFileType,
    progress: Progress,
    outputs: GGMLQuantizationType | None = None,
) -> None:
    """Writes `target`; where a tensor of `source` has its type already, bit for bit. outputs: type
    of the output matrix; None: a better one than that of the others.

    In a process of its own: the library can be stopped in no other way, ends the process where
    one of its checks fails, and has one log callback for all of its users. Raises ExportError.
    """
    arguments = [str(source), str(target), str(int(file_type))]
    arguments += [] if outputs is None else [str(int(outputs))]
    try:
        isolated(
            run_library,
            *arguments,
            timeout_s=_TIMEOUT_S,
            on_step=lambda done: progress("Quantizing with llama.cpp", done),
        )
    except IsolatedError as error:
        raise ExportError(
            f"llama.cpp could not quantize the model: {error}",
            remedy="Export with --quant Q4_0 or Q8_0.",
        ) from None


def run_library(source: str, target: str, file_type: str, outputs: str = "") -> None:
    """Runs in the other process."""
    import ctypes
    import os

    import llama_cpp

    api: Any = llama_cpp
    last = ""

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def on_line(level: int, text: bytes | None, data: Any) -> None:
        nonlocal last
        last = (text or b"").decode("utf-8", "replace").strip() or last
        if counter := _COUNTER.match(last):
            tell(int(counter[1]) / int(counter[2]))

    api.llama_log_set(on_line, None)
    params = api.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.allow_requantize = True
    if outputs:
        params.output_tensor_type = int(outputs)
    status = api.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    if status:
        raise RuntimeError(f"status {status}: {last}")
