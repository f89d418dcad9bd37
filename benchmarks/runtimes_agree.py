"""The same weights on two runtimes: perplexity of the packaged text, and greedy texts.

    python benchmarks/runtimes_agree.py FILE.gguf [--runtimes ort llamacpp]

Give a Q4_0 or Q8_0 file: those weights reach onnxruntime bit for bit. Where two texts part, the
first differing token is printed with the margin between the two candidates on each runtime.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.exporters.parity import compare, parity_text, score_text


def margin(engine: Engine, tokens: list[int], first: int, second: int) -> float:
    """Returns by how much the runtime prefers `first` to `second` after `tokens`."""
    session = engine.parts.model.open_session()
    try:
        session.prefill(tokens[:-1])
        logits = session.forward(TokenTree.chain(tokens[-1])).logits[0]
        return float(logits[first] - logits[second])
    finally:
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runtimes", nargs=2, default=["ort", "llamacpp"])
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    first, second = (
        open_engine(arguments.model, runtime=runtime, drafter="none")
        for runtime in arguments.runtimes
    )
    with first, second:
        text = first.parts.text.tokenizer.encode(parity_text())
        scores = [score_text(engine.parts.model, text) for engine in (first, second)]
        parity = compare(scores[0], scores[1], text)
        ratio = parity.perplexity / parity.source_perplexity
        print(f"perplexity {parity.source_perplexity:.4f} on {arguments.runtimes[0]}, ", end="")
        print(f"{parity.perplexity:.4f} on {arguments.runtimes[1]}: ratio {ratio:.4f}")
        print(
            f"KL divergence {parity.kl_divergence:.5f}, largest logit difference "
            f"{parity.max_logit_difference:.3f}"
        )
        prompts = read_prompts(arguments.prompts)[: arguments.count]
        partings = []
        for entry in prompts:
            prompt = first.chat_prompt(entry["prompt"])
            texts = [
                [token.id for token in engine.generate(prompt, max_tokens=arguments.tokens).tokens]
                for engine in (first, second)
            ]
            if texts[0] == texts[1]:
                continue
            at = int(np.argmin([a == b for a, b in zip(*texts, strict=False)]))
            before, pair = prompt + texts[0][:at], (texts[0][at], texts[1][at])
            margins = [margin(first, before, *pair), -margin(second, before, *pair)]
            partings.append({"id": entry["id"], "token": at, "margins": margins})
            print(
                f"prompt {entry['id']}: part at token {at}, margins "
                f"{margins[0]:.3f} and {margins[1]:.3f}"
            )
    print(f"{len(prompts) - len(partings)} of {len(prompts)} texts equal")
    report({"parity": parity._asdict(), "ratio": ratio, "partings": partings}, arguments.json)


if __name__ == "__main__":
    main()
