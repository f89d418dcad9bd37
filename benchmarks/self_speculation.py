"""What drafting with a part of the model itself could gain: early exits and skipped sublayers.

    python benchmarks/self_speculation.py                      # the demo model
    python benchmarks/self_speculation.py --exits 6 12 18 --prompts 4 --tokens 64

Agreement: how often the part's likeliest token is the target's, along the target's own greedy
answers, after what the target has read. Cost: a part's pass over one row against the target's,
medians of interleaved passes. Forecast: with n draft tokens a round, E = (1 - a^(n+1)) / (1 - a)
tokens for agreement a, in a time of n * cost + t(n + 1) / t(1), for the best n; 0 draft tokens is
plain decoding. Skipped sublayers (2 * layer: attention, 2 * layer + 1: MLP) are each one of the
middle ones, and then the least influential ones together, from one up to half of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.core.model import SelfDrafting, Session, SkippingSession
from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine

BLOCK_ROWS = 8  # of an answer that are compared at once
MAX_DRAFT_TOKENS = 8
Text = tuple[list[int], list[int]]  # the prompt and the greedy answer


def chain(tokens: Sequence[int]) -> TokenTree:
    return TokenTree.chain(tokens[0], tokens[1:])


def greedy_texts(engine: Engine, count: int, tokens: int) -> list[Text]:
    prompts = read_prompts(OWN_PROMPTS)
    chosen = prompts[:: -(-len(prompts) // count)]
    texts = []
    for entry in chosen:
        prompt = engine.chat_prompt(entry["prompt"])
        answer = engine.generate(prompt, max_tokens=tokens).tokens
        texts.append((prompt, [token.id for token in answer]))
    return texts


def agreements(
    target: Session, part: SkippingSession, sets: dict[str, frozenset[int]], texts: list[Text]
) -> dict[str, float]:
    """Each set scores a block of the answer before the target reads it."""
    right = dict.fromkeys(sets, 0)
    scored = 0
    for prompt, answer in texts:
        target.rollback(0)
        target.prefill(prompt[:-1])
        text = [prompt[-1], *answer]
        for start in range(0, len(text), BLOCK_ROWS):
            block = chain(text[start : start + BLOCK_ROWS])
            draft_tokens = {}
            for name, skipped in sets.items():
                part.skipped = skipped
                draft_tokens[name] = part.forward(block).logits.argmax(axis=1)
            chosen = target.forward(block).logits.argmax(axis=1)
            target.commit(range(len(block)))
            scored += len(block)
            for name, drafted in draft_tokens.items():
                right[name] += int((drafted == chosen).sum())
    return {name: count / scored for name, count in right.items()}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def costs(
    target: Session, part: SkippingSession, sets: dict[str, frozenset[int]], repetitions: int
) -> dict[str, float]:
    """Passes of one row, in units of the target's. Parts that leave out as many attentions and as
    many MLPs as each other share their measurements."""
    row = chain([0])
    kinds = {name: (len(skipped), sum(k % 2 for k in skipped)) for name, skipped in sets.items()}
    examples = {kinds[name]: skipped for name, skipped in sets.items()}
    taken: dict[tuple[int, int], list[float]] = {kind: [] for kind in examples}
    whole: list[float] = []
    for _ in range(repetitions):
        for kind, skipped in examples.items():
            part.skipped = skipped
            taken[kind].append(seconds(partial(part.forward, row)))
            whole.append(seconds(partial(target.forward, row)))
    return {name: median(taken[kind]) / median(whole) for name, kind in kinds.items()}


def widths(target: Session, repetitions: int) -> list[float]:
    """t(k) / t(1) for k = 1 to MAX_DRAFT_TOKENS + 1."""
    taken: list[list[float]] = [[] for _ in range(MAX_DRAFT_TOKENS + 1)]
    for _ in range(repetitions):
        for draft_tokens, times in enumerate(taken):
            rows = chain([0] * (draft_tokens + 1))
            times.append(seconds(partial(target.forward, rows)))
    return [median(times) / median(taken[0]) for times in taken]


def forecast(agreement: float, cost: float, t: Sequence[float]) -> tuple[float, int]:
    """The best speedup, and how many draft tokens a round reach it."""
    speedups = [sum(agreement**i for i in range(n + 1)) / (n * cost + t[n]) for n in range(len(t))]
    best = int(np.argmax(speedups))
    return speedups[best], best


def candidates(num_layers: int, exits: Sequence[int], influence: np.ndarray) -> dict[str, Any]:
    """Names of parts and what they leave out."""
    sublayers = 2 * num_layers
    sets = {
        f"exit {layers}": frozenset(range(2 * layers, sublayers))
        for layers in exits
        if layers < num_layers
    }
    sets |= {f"without {k}": frozenset({k}) for k in range(2, sublayers - 2)}
    order = np.argsort(influence).tolist()
    return sets | {f"least {n}": frozenset(order[:n]) for n in range(1, num_layers + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--exits", type=int, nargs="+", default=[6, 12, 18, 24, 27, 29])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    with open_engine(
        arguments.model, runtime="ort", drafter="none", threads=arguments.threads
    ) as engine:
        texts = greedy_texts(engine, arguments.prompts, arguments.tokens)
        target = engine.parts.model.open_session()
        assert isinstance(target, SelfDrafting)
        target.prefill(texts[0][0])
        part = target.open_skipping(frozenset())
        influence = part.influence(texts[0][1])
        sets = candidates(engine.parts.model.config.num_layers, arguments.exits, influence)
        agreement = agreements(target, part, sets, texts)
        t = widths(target, arguments.repetitions)
        cost = costs(target, part, sets, arguments.repetitions)
    print("influence", " ".join(f"{k}:{value:.3f}" for k, value in enumerate(influence)))
    print("t(k) / t(1)", " ".join(f"{ratio:.2f}" for ratio in t))
    print(f"\n{'part':12s}{'skipped':>8s}{'agreement':>10s}{'cost':>6s}{'n':>3s}{'forecast':>9s}")
    results: dict[str, dict[str, Any]] = {}
    for name, skipped in sets.items():
        speedup, draft_tokens = forecast(agreement[name], cost[name], t)
        results[name] = {
            "skipped": sorted(skipped),
            "agreement": agreement[name],
            "cost": cost[name],
            "num_guesses": draft_tokens,
            "speedup": speedup,
        }
        print(
            f"{name:12s}{len(skipped):8d}{agreement[name]:10.1%}{cost[name]:6.2f}{draft_tokens:3d}"
            f"{speedup:9.2f}"
        )
    best = max(results, key=lambda name: results[name]["speedup"])
    if results[best]["num_guesses"]:
        print(f"\nbest: {best}, {results[best]['speedup']:.2f} times plain decoding")
    else:
        print("\nThis model gains nothing: no part pays for its passes.")
    report({"influence": influence.tolist(), "t": t, "parts": results}, arguments.json)


if __name__ == "__main__":
    main()
