"""How far ONNX bundles of the demo model are from their source, over several texts.

    python benchmarks/distance.py OUT... --prompts spec_bench_dev.jsonl

The source is scored by llama.cpp, each bundle by onnxruntime. A short text's perplexity moves with
the last bits of a fit; the KL divergence, and the perplexity over thousands of tokens, hardly do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from edge_spec.core.model import RuntimeOptions
from edge_spec.exporters.parity import compare, parity_text, score_text
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel, resolve_model
from edge_spec.models.source import Source
from edge_spec.text.prompt_files import read_prompts

FILES = (
    "docs/lossless.md",
    "exporters/gguf_reader.py",
    "LICENSE",
    "docs/policy.md",
    "docs/models.md",
)
_TOKENS = 800  # of each text
_PROMPTS, _PROMPT_LETTERS = 30, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--prompts", type=Path)
    arguments = parser.parse_args()
    source = _resolved("smollm2", "llamacpp")
    encode = source.text.tokenizer.encode
    texts = {name: encode(text)[:_TOKENS] for name, text in read_texts(arguments.prompts).items()}
    expected = _scores(source, texts)
    print("| weights | text | tokens | perplexity of the source | perplexity | KL divergence |")
    print("|---|---|---|---|---|---|")
    for bundle in arguments.bundles:
        found = _scores(_resolved(bundle, "ort"), texts)
        sums = np.zeros(4)
        for name, tokens in texts.items():
            parity = compare(expected[name], found[name], tokens)
            losses = np.log([parity.source_perplexity, parity.perplexity])
            sums += (len(tokens) - 1) * np.array([1.0, *losses, parity.kl_divergence])
            print(_line(bundle, name, np.array([len(tokens) - 1, *losses, parity.kl_divergence])))
        print(_line(bundle, "all", np.array([sums[0], *sums[1:] / sums[0]])), flush=True)


def read_texts(prompts: Path | None) -> dict[str, str]:
    root = Path(__file__).parents[1]
    texts = {"parity": parity_text()}
    texts |= {name: (root / name).read_text(encoding="utf-8") for name in FILES}
    if prompts is not None:
        asked = [prompt.text[:_PROMPT_LETTERS] for prompt in read_prompts(prompts)]
        texts["prompts"] = "\n".join(asked[:_PROMPTS])
    return texts


def _resolved(model: str, runtime: str) -> ResolvedModel:
    quiet = lambda what, fraction: None  # noqa: E731
    return resolve_model(Source(model, quiet), runtime, LoadOptions(), quiet)


def _scores(resolved: ResolvedModel, texts: dict[str, list[int]]) -> dict[str, np.ndarray]:
    model = resolved.open(RuntimeOptions(context_length=_TOKENS + 200))
    try:
        return {name: score_text(model, tokens) for name, tokens in texts.items()}
    finally:
        model.close()


def _line(bundle: str, name: str, of: np.ndarray) -> str:
    """of: tokens, the losses of source and bundle, KL divergence."""
    before, after = np.exp(of[1:3])
    return f"| {bundle} | {name} | {of[0]:.0f} | {before:.2f} | {after:.2f} | {of[3]:.4f} |"


if __name__ == "__main__":
    main()
