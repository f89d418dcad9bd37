"""How far the float16 form of ONNX bundles, as GPUs get it, is from float32, on this CPU.

    python benchmarks/half.py BUNDLE... [--tokens 800] [--texts 1]

All forms score the packaged text of exports and some pages of this repository. A wide stream is
that of models whose residual stream float16 may not hold (runtimes/ort/half_graph.py). What they
are compared with rounds no activations; the form that the CPU runs is in the table for comparison.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from distance import FILES

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import SessionError
from edge_spec.exporters.parity import compare, parity_text, score_text
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtModel
from edge_spec.runtimes.ort.graph_forms import REFERENCE, GraphForm
from edge_spec.text.tokenizer import Tokenizer

_FORMS = {
    "int8 activations, as the CPU": None,
    "float16": GraphForm(is_half=True),
    "float16, wide stream": GraphForm(is_half=True, has_wide_stream=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=800, help="of each text")
    parser.add_argument("--texts", type=int, help="so many of the first; all, unless given")
    arguments = parser.parse_args()
    print(
        "| bundle | form | tokens | perplexity | in float32 | KL | logit off by | deviation off |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for path in arguments.bundles:
        bundle = open_bundle(path)
        tokenizer = Tokenizer((path / "tokenizer.json").read_text(encoding="utf-8"))
        root = Path(__file__).parents[1]
        texts = [parity_text(), *((root / name).read_text(encoding="utf-8") for name in FILES)]
        encoded = [tokenizer.encode(text)[: arguments.tokens] for text in texts[: arguments.texts]]
        expected = _scores(bundle, REFERENCE, encoded)
        for name, form in _FORMS.items():
            try:
                found = _scores(bundle, form, encoded)
            except SessionError as error:
                print(f"| {path.name} | {name} | {error.shown} | | | | | |", flush=True)
                continue
            print(f"| {path.name} | {name} | {_figures(expected, found, encoded)} |", flush=True)


def _scores(bundle: Bundle, form: GraphForm | None, texts: list[list[int]]) -> list[np.ndarray]:
    longest = max(map(len, texts)) + 1
    model = OrtModel(bundle, RuntimeOptions(context_length=longest), form)
    try:
        return [score_text(model, tokens) for tokens in texts]
    finally:
        model.close()


def _figures(expected: list[np.ndarray], found: list[np.ndarray], texts: list[list[int]]) -> str:
    """Means over all tokens, and the largest of all logits' and rows' differences."""
    sums, largest, deviation = np.zeros(4), 0.0, 0.0
    for before, after, tokens in zip(expected, found, texts, strict=True):
        parity = compare(before, after, tokens)
        losses = np.log([parity.perplexity, parity.source_perplexity])
        sums += (len(tokens) - 1) * np.array([1.0, *losses, parity.kl_divergence])
        largest = max(largest, parity.max_logit_difference)
        errors = np.std(after - before, axis=1) / np.std(before, axis=1)
        deviation = max(deviation, float(errors.max()))
    count, own, other, divergence = sums[0], *sums[1:] / sums[0]
    return (
        f"{count:.0f} | {np.exp(own):.3f} | {np.exp(other):.3f} | {divergence:.2e} | "
        f"{largest:.3f} | {deviation:.4f}"
    )


if __name__ == "__main__":
    main()
