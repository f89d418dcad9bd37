"""What the policy makes of a trained head and suffix lookup, at other costs of rows and drafts.

    python benchmarks/head_policy.py record HEAD PROMPTS OUT.json [--model smollm2]
    python benchmarks/head_policy.py replay OUT.json [--count N] [--json FILE]

`record` decodes each prompt plainly and greedily and asks the head after every token what it would
draft. `replay` runs the real round loop, the default policy and suffix lookup on these texts, on a
clock that passes and draft tokens advance, and prints ratios to plain decoding: of suffix lookup,
of the head alone, and of both, which is the default. A draft token of the head takes the given
share of a plain step, and t(k) grows by the given share a row, or as it was measured for the demo
model stretched 8 times in fp16 (Zen 3, 2 cores). All of it is simulated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import read_prompts, report

import edge_spec
from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import RoundPlan
from edge_spec.core.metrics import RoundStats, Stats
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.draft.ahead import AheadChoice
from edge_spec.drafters.draft.candidates import PRIORS, Line
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import Growth, nothing
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.placement.replay import (
    MAX_ROWS,
    Charged,
    DraftCost,
    RecordedSession,
    Recording,
    VirtualClock,
)

MOST_DRAFT_TOKENS = 8
PLAIN_S = 0.12
MEASURED = {1: 1, 2: 1.23, 3: 1.18, 4: 1.21, 5: 1.35, 6: 1.4, 8: 1.66, 10: 1.75, 12: 1.88, 16: 2.26}
SLOPES = (0.03, 0.1, 0.15)
DRAFT_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2)  # of a plain step
SUFFIX = DraftCost(200e-6, 20e-6, 100e-6)


class AsksAfterEveryToken:
    """A policy that verifies nothing of what it asks for."""

    def __init__(self) -> None:
        self.kinds: list[int] = []  # of the first choice of each pass of the head
        self.drafted: list[tuple[list[int], list[int]]] = []  # tokens and kinds, by round

    def begin(self) -> None:
        self.drafted = []

    def wants(self, drafter: Drafter) -> bool:
        return True

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        self.kinds.clear()
        limits = Budget(MOST_DRAFT_TOKENS, MOST_DRAFT_TOKENS + 1, branches=False)
        tokens = drafters[0].propose(pending, limits).tokens.tolist()[1:]
        self.drafted.append((tokens, self.kinds[: len(tokens)]))
        return RoundPlan(TokenTree.chain(pending), None)

    def observe(self, round_stats: RoundStats) -> None: ...


def record(arguments: argparse.Namespace) -> None:
    asking = AsksAfterEveryToken()
    likeliest, begin = EagleNetwork.likeliest, Decoder.__init__

    def noted(network: EagleNetwork, scores: np.ndarray) -> list[tuple[int, int]]:
        found = likeliest(network, scores)
        asking.kinds.append(found[0][1])
        return found

    def asked(
        decoder: Decoder, session: Any, drafters: Any, policy: Any, *rest: Any, **more: Any
    ) -> None:
        begin(decoder, session, drafters, asking, *rest, **more)

    setattr(EagleNetwork, "likeliest", noted)  # noqa: B010
    setattr(Decoder, "__init__", asked)  # noqa: B010
    texts = []
    with edge_spec.load(arguments.model, draft=str(arguments.head), runtime="ort") as engine:
        engine.set_drafter("eagle")
        for entry in read_prompts(arguments.prompts):
            answer = engine.chat(entry["prompt"], max_tokens=arguments.tokens)
            texts.append(
                {
                    "category": entry["category"],
                    "prompt": list(engine.chat_prompt(entry["prompt"])),
                    "tokens": [token.id for token in answer.tokens],
                    "drafted": asking.drafted,
                }
            )
            print(".", end="", flush=True)
    arguments.file.write_text(json.dumps(texts), encoding="utf-8")


class RecordedHead(Drafter):
    """Drafts what a head has drafted there."""

    name = "eagle"
    traits = DrafterTraits(head="eagle")

    def __init__(self, clock: VirtualClock, token_s: float) -> None:
        self._clock, self._token_s = clock, token_s
        self._acceptance = LearntAcceptance(PRIORS)
        self._growth = nothing(0)
        self.drafted: list[tuple[list[int], list[int]]] = []  # of the text, by position
        self._position = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._position, self._growth = 0, nothing(prompt[-1])

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        tokens, kinds = self.drafted[self._position]
        line = Line(min(budget.num_draft_tokens, len(tokens)), budget.min_reach, self._acceptance)
        while line.goes_on:
            which = len(line.choices)
            line.add(AheadChoice(tokens[which], kinds[which], None))
            self._clock.advance(self._token_s)
        chosen = [choice.token for choice in line.choices]
        tree = TokenTree.chain(pending, chosen, line.confidence, self.name)
        self._growth = Growth(tree, (None, *(choice.kind for choice in line.choices)))
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._position += len(verdict.tokens)
        self._growth = nothing(0)


def decoded(
    texts: Sequence[dict[str, Any]], names: str, pass_s: Callable[[int], float], token_s: float
) -> float:
    """How many times as fast as plain decoding."""
    clock = VirtualClock()
    head = RecordedHead(clock, token_s)
    makers: dict[str, Callable[[], Drafter]] = {
        "suffix": lambda: Charged(SuffixDrafter(), SUFFIX, clock),
        "head": lambda: head,
    }
    drafters = [makers[name]() for name in names.split("+")]
    costs = RowCosts({rows: pass_s(rows) for rows in (1, 2, 4, 8, 16)})
    policy = AdaptivePolicy(costs, {}, {"suffix"}, branches=False, clock=clock)
    vocab_size = 1 + max(max(text["prompt"] + text["tokens"]) for text in texts)
    logits = np.full((MAX_ROWS, vocab_size), -1e4, np.float32)
    tokens = 0
    for text in texts:
        head.drafted = text["drafted"]
        written = np.array(text["tokens"], np.int32)[:, None]
        recording = Recording(
            text["category"],
            tuple(text["prompt"]),
            tuple(text["tokens"]),
            written,
            np.zeros(written.shape, np.float32),
        )
        session = RecordedSession(recording, logits, lambda rows, _: pass_s(rows), clock)
        session.prefill(recording.prompt[:-1])
        limits = GenerationLimits(len(written), frozenset(), 1 << 20, MAX_ROWS)
        sampler, stats = Sampler(SamplingParams(), recording.prompt), Stats()
        decoder = Decoder(session, drafters, policy, clock=clock)
        for _ in decoder.decode(recording.prompt, sampler, limits, stats.observe):
            pass
        session.close()
        tokens += stats.predicted_n
    return tokens * pass_s(1) / clock.now_s


def measured(rows: int) -> float:
    return PLAIN_S * float(np.interp(rows, list(MEASURED), list(MEASURED.values())))


def sloped(slope: float) -> Callable[[int], float]:
    return lambda rows: PLAIN_S * (1 + slope * (rows - 1))


def replay(arguments: argparse.Namespace) -> None:
    texts = json.loads(arguments.file.read_text(encoding="utf-8"))[: arguments.count]
    curves = {"measured": measured, **{f"{slope} a row": sloped(slope) for slope in SLOPES}}
    results: dict[str, Any] = {}
    print("| t(k) | a draft token | suffix | the head | both |\n|---|---|---|---|---|")
    for name, pass_s in curves.items():
        for share in DRAFT_TOKEN:
            arms = {
                names: decoded(texts, names, pass_s, share * PLAIN_S)
                for names in ("suffix", "head", "suffix+head")
            }
            results[f"{name}, {share}"] = arms
            ratios = " | ".join(f"{each:.2f}" for each in arms.values())
            print(f"| {name} | {share} | {ratios} |", flush=True)
    report({"head_policy": results}, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("head", type=Path)
    recording.add_argument("prompts", type=Path)
    recording.add_argument("file", type=Path)
    recording.add_argument("--model", default="smollm2")
    recording.add_argument("--tokens", type=int, default=96)
    recording.set_defaults(run=record)
    replaying = commands.add_parser("replay")
    replaying.add_argument("file", type=Path)
    replaying.add_argument("--count", type=int, help="of texts, from the first one")
    replaying.add_argument("--json", type=Path)
    replaying.set_defaults(run=replay)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
