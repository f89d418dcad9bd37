"""Records where drafts of graded quality are right, for `replay_pairs.py`.

    python benchmarks/record_hits.py benchmarks/recorded_hits.json

The demo model answers the packaged prompts greedily. Its drafts are itself with layers left out:
each reads the same text, and of every token is kept where in the draft's ranking it stands (0, 1,
or 2 for anything later) and how certain the draft was of its first choice, in tenths. One digit a
token of each, so that the file stays small; no weights and no texts are in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import OWN_PROMPTS, machine, open_engine, read_prompts

from edge_spec.core.model import SelfDrafting, Session, SkippingSession
from edge_spec.core.tree import TokenTree

BLOCK_ROWS = 8
# Of 30 layers, those that each draft leaves out; the middle ones are missed least.
DRAFTS = {
    "good": (15,),
    "fair": (12, 18),
    "poor": (7, 9, 11, 14, 17, 20, 23),
}


def sublayers(layers: tuple[int, ...]) -> frozenset[int]:
    return frozenset(each for layer in layers for each in (2 * layer, 2 * layer + 1))


def ranks_and_certainty(logits: np.ndarray, chosen: np.ndarray) -> tuple[str, str]:
    """One digit a row of each. logits: [rows, vocab] of the draft; chosen: the target's tokens."""
    wider = logits.astype(np.float64)
    probs = np.exp(wider - wider.max(axis=1, keepdims=True))
    best = (probs.max(axis=1) / probs.sum(axis=1) * 10).astype(int).clip(0, 9)
    its = np.take_along_axis(logits, chosen[:, None], axis=1)
    ranks = (logits > its).sum(axis=1).clip(0, 2)
    return "".join(map(str, ranks)), "".join(map(str, best))


def read_text(
    target: Session, part: SkippingSession, prompt: list[int], answer: list[int]
) -> dict[str, dict[str, str]]:
    """Each draft scores a block of the answer before the target reads it."""
    target.rollback(0)
    target.prefill(prompt[:-1])
    text = [prompt[-1], *answer[:-1]]
    found = {name: {"ranks": "", "certainty": ""} for name in DRAFTS}
    for start in range(0, len(text), BLOCK_ROWS):
        block = TokenTree.chain(text[start], text[start + 1 : start + BLOCK_ROWS])
        drafted = {}
        for name, layers in DRAFTS.items():
            part.skipped = sublayers(layers)
            drafted[name] = part.forward(block).logits.copy()
        chosen = target.forward(block).logits.argmax(axis=1)
        target.commit(range(len(block)))
        for name, logits in drafted.items():
            ranks, certainty = ranks_and_certainty(logits, chosen)
            found[name]["ranks"] += ranks
            found[name]["certainty"] += certainty
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--per-category", type=int, default=2)
    arguments = parser.parse_args()
    texts: list[dict[str, Any]] = []
    with open_engine("smollm2", drafter="none") as engine:
        target = engine.parts.model.open_session()
        assert isinstance(target, SelfDrafting)
        part = target.open_skipping(frozenset())
        for entry in read_prompts(OWN_PROMPTS, arguments.per_category):
            prompt = engine.chat_prompt(entry["prompt"])
            answer = [
                each.id for each in engine.generate(prompt, max_tokens=arguments.tokens).tokens
            ]
            drafts = read_text(target, part, prompt, answer)
            texts.append({"category": entry["category"], "drafts": drafts})
        target.close()
    for name in DRAFTS:
        ranks = "".join(text["drafts"][name]["ranks"] for text in texts)
        print(f"{name}: {len(ranks)} tokens, {ranks.count('0') / len(ranks):.2f} right")
    about = {"model": "smollm2", "left_out": DRAFTS, **machine()}
    arguments.out.write_text(json.dumps({"about": about, "texts": texts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
