"""Checks what sessions promise on every runtime and device, and says how far scores differ.

    python benchmarks/conformance.py FILE.gguf
    GGML_BACKEND_PATH=VULKAN.so GGML_VK_VISIBLE_DEVICES=0 python benchmarks/conformance.py FILE.gguf

The file is opened as it is by llama.cpp, and converted for onnxruntime, whose forms for other
devices are computed on the CPU: float16, and with its cache as one block. Each runs
`edge_spec.testing.check_session`; the differences are those of two ways to score the same rows, in
logits, whose deviation stands beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import resolve_model
from edge_spec.models.source import Source
from edge_spec.runtimes.ort.device_place import Place
from edge_spec.runtimes.ort.graph_forms import GraphForm
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.testing import check_session

CONTEXT = 512  # tokens: short, because the check fills it
TOLERANCE = 2.0  # logits: it is told how far they are, not whether that is enough


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    rows = [["runtime", "device, form", "trees", "largest difference", "of deviation"]]
    for name, model in opened(arguments.model):
        runtime, _, form = name.partition(": ")
        difference = check_session(model, TOLERANCE).max_difference
        share = difference / deviation(model)
        trees = "yes" if model.capabilities.trees else "no"
        rows.append([runtime, form, trees, f"{difference:.2g}", f"{share:.1%}"])
        model.close()
    for row in rows:
        print("| " + " | ".join(row) + " |")


def opened(path: Path) -> Iterator[tuple[str, Model]]:
    """One at a time."""
    options = RuntimeOptions(context_length=CONTEXT)
    bundle = resolve_model(Source(str(path), _quiet), "ort", LoadOptions(), _quiet).source
    half, block = GraphForm(is_half=True), Place("cpu", 0)
    yield "ort: cpu, float32", OrtModel(bundle, options)
    yield "ort: cpu, float16", OrtModel(bundle, options, half)
    yield "ort: cpu, float16, cache in one block", OrtModel(bundle, options, half, block)
    yield "openvino: cpu, float32", runtimes.load_runtime("openvino").open(bundle, options)
    llamacpp = runtimes.load_runtime("llamacpp")
    info = runtimes.open_model_info(path)
    for device in llamacpp.devices(options):  # type: ignore[attr-defined]
        if device.name is not None and device.fault is None:
            how = replace(options, providers=(device.name,))
            yield f"llamacpp: {device.name}", llamacpp.open(info, how)


def _quiet(what: str, fraction: float) -> None:
    pass


def deviation(model: Model) -> float:
    """Returns the standard deviation of a row's scores."""
    session = model.open_session()
    session.prefill([1, 2, 3, 4])
    found = float(np.std(session.forward(TokenTree.chain(5)).logits))
    session.close()
    return found


if __name__ == "__main__":
    main()
