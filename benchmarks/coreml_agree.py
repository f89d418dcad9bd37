"""How far a Core ML package, evaluated in numpy, is from the reference on the same weights.

    python benchmarks/coreml_agree.py smollm2 BUNDLE [BUNDLE ...]

For each bundle of `edge-spec export --format coreml`: the largest difference of a logit after a
prompt of 100 tokens, in a plain step and in a random tree of 8 rows, and whether the likeliest
tokens are the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.models import runtimes
from edge_spec.models.bundle import open_bundle
from edge_spec.models.source import Source

PROMPT_TOKENS, TREE_ROWS = 100, 8


def main(model: str, *bundles: str) -> None:
    checkpoint = runtimes.open_checkpoint(Source(model, lambda what, fraction: None).path)
    random = np.random.RandomState(0)
    prompt = random.randint(0, checkpoint.config.vocab_size, PROMPT_TOKENS).tolist()
    parents = [-1, *(random.randint(0, row) for row in range(1, TREE_ROWS))]
    tokens = random.randint(0, checkpoint.config.vocab_size, TREE_ROWS)
    tree = TokenTree(
        tokens.astype(np.int32), np.array(parents, np.int32), np.ones(TREE_ROWS, np.float32)
    )
    passes = {"step": TokenTree.chain(int(tokens[0])), f"tree of {TREE_ROWS}": tree}
    reference = runtimes.load_runtime("reference").open(checkpoint, RuntimeOptions())
    expected = scores(reference.open_session(), prompt, passes)
    for path in bundles:
        opened = runtimes.load_runtime("mil").open(open_bundle(Path(path)), RuntimeOptions())
        found = scores(opened.open_session(), prompt, passes)
        for name in passes:
            far = np.abs(found[name] - expected[name]).max()
            same = (found[name].argmax(axis=1) == expected[name].argmax(axis=1)).mean()
            print(
                f"{path}, {name}: {far:.2g} of {np.abs(expected[name]).max():.3g}, same {same:.0%}"
            )
        opened.close()


def scores(
    session: Session, prompt: list[int], passes: dict[str, TokenTree]
) -> dict[str, np.ndarray]:
    session.prefill(prompt)
    return {name: session.forward(tree).logits.copy() for name, tree in passes.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
