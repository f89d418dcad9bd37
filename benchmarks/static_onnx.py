"""Static ONNX bundles beside dynamic ones of the same model, both in onnxruntime on this CPU.

    python benchmarks/static_onnx.py MODEL OUT [--quant fp32 fp16 int8 int4] [--context 512]

Writes both kinds below OUT, or takes what is there. Both score the same tokens in chains of 1, 4
and 8 rows; the integers of the two kinds are not the same (8-bit channels and symmetric 4-bit
blocks in static ones), so that their difference is of both roundings. Times are medians, of the two
in turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.parity import parity_text
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, is_bundle, open_bundle
from edge_spec.models.source import Source
from edge_spec.text.tokenizer import Tokenizer

FORMATS = ("onnx", "onnx-static")
WIDTHS = (1, 4, 8)
PROMPT_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--quant", nargs="+", default=["fp32", "fp16", "int8", "int4"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--passes", type=int, default=20, help="of each width")
    arguments = parser.parse_args()
    print("| weights | graph | MB | logit off by | prompt of 256 | 1 row | 4 rows | 8 rows |")
    print("|---|---|---|---|---|---|---|---|")
    for quantization in arguments.quant:
        bundles = [_bundle(arguments, format, quantization) for format in FORMATS]
        opened = [runtimes.load_runtime("ort").open(each, RuntimeOptions()) for each in bundles]
        tokens = _tokens(bundles[0], arguments.context)
        difference = _difference(opened, tokens)
        seconds = _seconds(opened, tokens, arguments.passes)
        for bundle, own in zip(bundles, seconds, strict=True):
            static = bundle.manifest.format == FORMATS[1]
            figures = " | ".join(f"{1000 * each:.1f} ms" for each in own)
            off = f"{difference:.2g}" if static else ""
            name = "static" if static else "dynamic"
            print(
                f"| {quantization} | {name} | {bundle.num_bytes / 1e6:.0f} | {off} | {figures} |",
                flush=True,
            )
        for each in opened:
            each.close()


def _bundle(arguments: argparse.Namespace, format: str, quantization: str) -> Bundle:
    out = arguments.out / f"{format}-{quantization}"
    if not is_bundle(out):
        exporter = runtimes.load_exporter(format)
        path = Source(arguments.model, _quiet).path
        context = arguments.context if format == FORMATS[1] else None
        options = ExportOptions(quantization, check=False, context_length=context)
        exporter.export(runtimes.open_exportable(exporter, path), out, options, _quiet)
    return open_bundle(out)


def _tokens(bundle: Bundle, context: int) -> list[int]:
    tokenizer = Tokenizer((bundle.path / "tokenizer.json").read_text(encoding="utf-8"))
    text = tokenizer.encode(parity_text())
    count = min(context, PROMPT_TOKENS + 2 * sum(WIDTHS))
    return (text * (1 + count // len(text)))[:count]


def _difference(opened: list[Model], tokens: list[int]) -> float:
    """The largest of a logit, of chains of all widths after the prompt."""
    scores = []
    for model in opened:
        session = model.open_session()
        session.prefill(tokens[:PROMPT_TOKENS])
        scores.append(np.concatenate([_score(session, tokens, width) for width in WIDTHS]))
        session.close()
    return float(np.abs(scores[0] - scores[1]).max())


def _seconds(opened: list[Model], tokens: list[int], passes: int) -> list[list[float]]:
    """Of the prompt, and of a pass of each width after it, for each model."""
    sessions = [model.open_session() for model in opened]
    prompts: list[list[float]] = [[] for _ in opened]
    for _ in range(4):  # of which the first loads
        for session, times in zip(sessions, prompts, strict=True):
            session.rollback(0)
            started_s = time.perf_counter()
            session.prefill(tokens[:PROMPT_TOKENS])
            times.append(time.perf_counter() - started_s)
    found = [[median(times[1:])] for times in prompts]
    for width in WIDTHS:
        times_of = [[_timed(session, tokens, width) for session in sessions] for _ in range(passes)]
        for own, times in zip(found, zip(*times_of[2:], strict=True), strict=True):
            own.append(median(times))
    return found


def _timed(session: Session, tokens: list[int], width: int) -> float:
    started_s = time.perf_counter()
    _score(session, tokens, width)
    return time.perf_counter() - started_s


def _score(session: Session, tokens: list[int], width: int) -> np.ndarray:
    chain = TokenTree.chain(tokens[PROMPT_TOKENS], tokens[PROMPT_TOKENS + 1 :][: width - 1])
    return session.forward(chain).logits.copy()


def _quiet(what: str, fraction: float) -> None:
    pass


if __name__ == "__main__":
    main()
