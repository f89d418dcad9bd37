"""Runs in a process of its own: QNN's compiler, which may crash or hang."""

from __future__ import annotations

import sys
import time
from collections import Counter
from json import loads
from pathlib import Path
from typing import Any

from edge_spec.core.isolated import tell

_ERROR = 3  # onnxruntime's severity
BINARY_SUFFIX = "_qnn.bin"  # as the provider names the file beside the first function


def compile_all(request: str) -> dict[str, Any]:
    """Compiles the graphs of one bundle into one binary and returns what is in it.

    They share weights only while sessions of one process compile them, so that a process for each
    would store all weights once a function.

    request: JSON of `graphs`, paths by functions' names, `out`, a directory, and `options`, of the
    provider.
    """
    import onnxruntime
    import onnxruntime_qnn as provider

    asked = loads(request)
    name = provider.get_ep_name()
    onnxruntime.register_execution_provider_library(name, provider.get_library_path())
    device = next(each for each in onnxruntime.get_ep_devices() if each.ep_name == name)
    options = {"backend_path": provider.get_qnn_htp_path(), **asked["options"]}
    graphs = asked["graphs"]
    sessions, outside, seconds = [], {}, {}
    for number, (function, path) in enumerate(graphs.items()):
        print(f"while it compiled {function}", file=sys.stderr, flush=True)
        settings = _settings(onnxruntime, Path(asked["out"]) / f"{function}.onnx")
        if number + 1 == len(graphs):
            settings.add_session_config_entry("ep.stop_share_ep_contexts", "1")
        settings.add_provider_for_devices([device], options)
        start = time.perf_counter()
        session = onnxruntime.InferenceSession(path, settings, enable_fallback=0)
        seconds[function] = time.perf_counter() - start
        sessions.append(session)  # the weights are shared with those that are open
        outside[function] = _nodes(session, name)
        tell((number + 1) / len(graphs))
    versions = {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime-qnn": provider.__version__,
        "qnn": provider.build_and_package_info.qnn_version,
    }
    return {
        "versions": versions,
        "inside": {function: found[0] for function, found in outside.items()},
        "outside": {function: found[1] for function, found in outside.items()},
        "seconds": seconds,
    }


def _settings(onnxruntime: Any, out: Path) -> Any:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = _ERROR
    entries = {
        "ep.context_enable": "1",
        "ep.context_file_path": str(out),
        "ep.context_embed_mode": "0",
        "ep.share_ep_contexts": "1",
        "session.record_ep_graph_assignment_info": "1",
    }
    for key, value in entries.items():
        made.add_session_config_entry(key, value)
    return made


def _nodes(session: Any, provider: str) -> tuple[int, dict[str, int]]:
    """Returns how many the provider took, and those that it left, by operator."""
    inside, outside = 0, Counter[str]()
    for part in session.get_provider_graph_assignment_info():
        if part.ep_name == provider:
            inside += len(part.get_nodes())
        else:
            outside.update(node.op_type for node in part.get_nodes())
    return inside, dict(sorted(outside.items()))
