"""Compiles a model for Qualcomm's NPU and prints what the binary is; the NPU's emulator, which is
part of the compiler's library on x86-64, tells how far its scores are from the CPU's.

    python benchmarks/htp_binary.py MODEL [--quant int4] [--soc SM8650] [--context 512] [--emulate]

The emulator compiles a function again and takes about a minute for four rows of the demo model: its
time says nothing of an NPU's. Needs the extra `qnn`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.exporters.qnn import SOCS, HtpGraphs, QnnExporter
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.models.source import Source
from edge_spec.runtimes.ort.static import OrtGraphs, open_static
from edge_spec.text.tokenizer import Tokenizer

TEXT = "The lighthouse keeper counted the ships in the harbour"
ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--soc", default="SM8650")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--emulate", action="store_true", help="only this: nothing is compiled")
    asked = parser.parse_args()
    path = Source(asked.model, quiet).path
    source = runtimes.open_exportable(QnnExporter(), path)
    options = ExportOptions(asked.quant, context_length=asked.context, check=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if asked.emulate:
            StaticOnnxExporter().export(source, out / "static", options, quiet)
            HtpGraphs().export(source, out / "formed", options, quiet)
            formed = out / "formed" / f"rows_{ROWS}.onnx"
            print(dumps(compared(open_bundle(out / "static"), asked.soc, formed)))
            return
        given = ExportOptions(
            asked.quant, check=False, compute=asked.soc, context_length=asked.context
        )
        report = QnnExporter().export(source, out / "compiled", given, quiet)
        for file in sorted((out / "compiled").iterdir()):
            print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
        print(*report.notes, sep="\n")


def quiet(what: str, fraction: float) -> None:
    pass


def compared(bundle: Bundle, soc: str, formed: Path) -> dict[str, float]:
    """Scores the last rows of a text on the CPU and on the emulator, which gets the same cache."""
    given, expected = cpu_pass(bundle)
    found = emulated(formed, soc, given)
    difference = np.abs(found - expected)
    return {
        "of_deviation": float(np.std(found - expected, axis=1).max() / expected.std(axis=1).min()),
        "largest_difference": float(difference.max()),
        "same_top_tokens": int((found.argmax(1) == expected.argmax(1)).sum()),
        "rows": ROWS,
        "kl_divergence": float(kl_divergence(expected, found).max()),
    }


def cpu_pass(bundle: Bundle) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The inputs of a pass over the text's last rows, and its scores."""
    tokenizer = Tokenizer(bundle.file("tokenizer.json").read_text(encoding="utf-8"))
    tokens = [each % bundle.config.vocab_size for each in tokenizer.encode(TEXT)]
    kept: dict[str, np.ndarray] = {}
    run = OrtGraphs.run

    def keeps(graphs: OrtGraphs, name: str, inputs: Mapping[str, np.ndarray], *rest: Any) -> Any:
        kept.update({each: np.array(value) for each, value in inputs.items()})
        return run(graphs, name, inputs, *rest)

    session = open_static(bundle, RuntimeOptions()).open_session()
    session.prefill(tokens[:-ROWS])
    OrtGraphs.run = keeps  # type: ignore[method-assign]
    tree = TokenTree(
        np.array(tokens[-ROWS:], np.int32),
        np.arange(-1, ROWS - 1, dtype=np.int32),
        np.ones(ROWS, np.float32),
    )
    scores = session.forward(tree).logits
    OrtGraphs.run = run  # type: ignore[method-assign]
    return kept, np.array(scores, np.float32)


def emulated(graph: Path, soc: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
    import onnxruntime
    import onnxruntime_qnn as provider

    name = provider.get_ep_name()
    onnxruntime.register_execution_provider_library(name, provider.get_library_path())
    device = next(each for each in onnxruntime.get_ep_devices() if each.ep_name == name)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    options = {"soc_model": str(SOCS[soc].model), "htp_arch": str(SOCS[soc].htp_arch)}
    options["backend_path"] = provider.get_qnn_htp_path()
    settings.add_provider_for_devices([device], options)
    session = onnxruntime.InferenceSession(graph, settings)
    wanted = {each.name for each in session.get_inputs()}
    inputs = {each: value for each, value in given.items() if each in wanted}
    return np.asarray(session.run(["logits"], inputs)[0], np.float32)


def kl_divergence(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Returns the KL divergence of each row, in nats."""
    p, q = (log_softmax(each) for each in (expected, found))
    return (np.exp(p) * (p - q)).sum(axis=1)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    sys.exit(main())
