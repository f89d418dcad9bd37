"""A GGUF file in K-quants, as llama.cpp reads it and as onnxruntime gets it: two of the three are
made of its float32 form, so that they do not share its rounding.

    python benchmarks/requantized.py FILE.gguf perplexity|texts|rates

perplexity: of the packaged text and five files of this repository, with the KL divergence from the
float32 form in llama.cpp. texts: greedy ones of onnxruntime in float32 against llama.cpp on the
float32 form with a float32 cache; where two part, by how much each prefers its own token. rates:
tokens a second without drafting and as set up by default, in turns, medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report
from gguf.constants import LlamaFileType

from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.exporters.gguf.kquants import quantize
from edge_spec.exporters.parity import compare, parity_text, score_text
from edge_spec.storage.atomic import cache_directory

_TOKENS = 500  # of each text
_FILES = (
    "docs/lossless.md",
    "exporters/gguf_reader.py",
    "LICENSE",
    "docs/policy.md",
    "docs/models.md",
)
_CONTEXT = 1024


class Weights(NamedTuple):
    """Names weights, the options that open them, and whether they are opened as float32."""

    name: str
    options: dict[str, Any]
    is_float: bool = False


SOURCE = Weights("llamacpp float32", {"runtime": "llamacpp", "kv_type": "f32"}, is_float=True)
OF_FILE = Weights("llamacpp", {"runtime": "llamacpp"})
ORT = [
    Weights(f"ort {kind}", {"runtime": "ort", "quantization": kind})
    for kind in ("int4", "int8", "fp32")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=["perplexity", "texts", "rates"])
    parser.add_argument("--count", type=int, default=8, help="of prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measure = {"perplexity": perplexity, "texts": texts, "rates": rates}[arguments.what]
    report({arguments.what: measure(arguments)}, arguments.json)


def opened(model: Path, weights: Weights, drafter: str = "none") -> Engine:
    path = float_form(model) if weights.is_float else model
    return open_engine(
        str(path), drafter=drafter, context_length=_CONTEXT, plan=None, **weights.options
    )


def float_form(model: Path) -> Path:
    """The file with all matrices as float32, kept in the cache."""
    path = cache_directory() / "benchmarks" / f"{model.stem}-f32.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        quantize(model, path, LlamaFileType.ALL_F32, lambda what, fraction: None)
    return path


def perplexity(arguments: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with opened(arguments.model, SOURCE) as engine:
        encode = engine.parts.text.tokenizer.encode
        tokens = [encode(text)[:_TOKENS] for text in read_texts().values()]
        expected = [score_text(engine.parts.model, each) for each in tokens]
    counts = [len(each) - 1 for each in tokens]
    print(f"{sum(counts)} tokens of {len(tokens)} texts")
    print("| weights | perplexity | KL divergence |\n|---|---|---|")
    for weights in (SOURCE, OF_FILE, *ORT):
        with opened(arguments.model, weights) as engine:
            model = engine.parts.model
            parities = [
                compare(before, score_text(model, each), each)
                for before, each in zip(expected, tokens, strict=True)
            ]
        losses = [[np.log(each.perplexity), each.kl_divergence] for each in parities]
        loss, divergence = np.average(losses, axis=0, weights=counts)
        found[weights.name] = [float(np.exp(loss)), float(divergence)]
        print(f"| {weights.name} | {np.exp(loss):.2f} | {divergence:.4f} |", flush=True)
    return found


def read_texts() -> dict[str, str]:
    """Returns the packaged text of exports and pages of this repository, by their names."""
    root = Path(__file__).parents[1]
    texts = {"parity": parity_text()}
    return texts | {name: (root / name).read_text(encoding="utf-8") for name in _FILES}


def texts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    partings = []
    with ExitStack() as stack:
        engines = [stack.enter_context(opened(arguments.model, each)) for each in (ORT[-1], SOURCE)]
        asked = list(prompts(engines[0], arguments.count))
        for number, prompt in asked:
            both = [answered(engine, prompt, arguments.tokens)[0] for engine in engines]
            if both[0] != both[1]:
                partings.append({"id": number, **parting(engines, prompt, both)})
                print(f"prompt {number}: {partings[-1]}")
    print(f"{len(asked) - len(partings)} of {len(asked)} texts equal")
    return partings


def parting(engines: list[Engine], prompt: list[int], both: list[list[int]]) -> dict[str, Any]:
    """Returns where two texts part, and by how much each engine prefers its own token there."""
    at = int(np.argmin([a == b for a, b in zip(*both, strict=False)]))
    before, pair = prompt + both[0][:at], (both[0][at], both[1][at])
    margins = [margin(engines[0], before, *pair), -margin(engines[1], before, *pair)]
    return {"token": at, "margins": margins}


def margin(engine: Engine, tokens: list[int], first: int, second: int) -> float:
    """Returns by how much the runtime prefers `first` to `second` after `tokens`."""
    session = engine.parts.model.open_session()
    try:
        session.prefill(tokens[:-1])
        logits = session.forward(TokenTree.chain(tokens[-1])).logits[0]
        return float(logits[first] - logits[second])
    finally:
        session.close()


def prompts(engine: Engine, count: int) -> Iterator[tuple[str, list[int]]]:
    """Yields ids and tokens of prompts to be continued: the file may have no chat template."""
    for entry in read_prompts(OWN_PROMPTS)[:: max(1, 26 // count)][:count]:
        yield str(entry["id"]), engine.parts.text.tokenizer.encode(entry["prompt"])


def rates(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    measured = [OF_FILE, *ORT[:2]]
    taken: dict[str, list[float]] = {}
    equal: dict[str, int] = dict.fromkeys((each.name for each in measured), 0)
    with ExitStack() as stack:
        engines = {
            weights.name: [
                stack.enter_context(opened(arguments.model, weights, drafter))
                for drafter in ("none", "auto")
            ]
            for weights in measured
        }
        asked = list(prompts(next(iter(engines.values()))[0], arguments.count))
        for _ in range(arguments.repetitions):
            for name, pair in engines.items():
                answers = [
                    [answered(engine, each, arguments.tokens) for _, each in asked]
                    for engine in pair
                ]
                for kind, found in zip(("plain", "default"), answers, strict=True):
                    tokens = sum(len(text) for text, _ in found)
                    taken.setdefault(f"{name} {kind}", []).append(
                        tokens / sum(seconds for _, seconds in found)
                    )
                for (number, prompt), (a, _), (b, _) in zip(asked, *answers, strict=True):
                    equal[name] += a == b
                    if a != b:
                        print(f"{name}, prompt {number}: {parting(pair, prompt, [a, b])}")
    print("| weights | plain tokens/s | default drafting | ratio | texts equal |")
    print("|---|---|---|---|---|")
    results = {}
    for name in equal:
        plain, drafted = (median(taken[f"{name} {kind}"]) for kind in ("plain", "default"))
        results[name] = {"plain": plain, "default": drafted, "equal": equal[name]}
        of = len(asked) * arguments.repetitions
        print(
            f"| {name} | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} | "
            f"{equal[name]} of {of} |"
        )
    return results


def answered(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """The answer, and seconds after the prompt."""
    start = time.perf_counter()
    result = engine.generate(prompt, max_tokens=tokens)
    seconds = time.perf_counter() - start - result.stats.prompt_ms / 1e3
    return [token.id for token in result.tokens], seconds


if __name__ == "__main__":
    main()
