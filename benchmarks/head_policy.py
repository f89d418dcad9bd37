"""Replays a trained head and suffix lookup under the policy, at other costs of rows and drafts.

    python benchmarks/head_policy.py record HEAD PROMPTS OUT.json [--model smollm2]
    python benchmarks/head_policy.py replay OUT.json [--count N] [--checked 0.2] [--json FILE]

`record` decodes each prompt plainly and greedily and asks the head after every token what it would
draft. `replay` runs the real round loop, the default policy and suffix lookup on these texts, on a
clock that passes and draft tokens advance, and prints ratios to plain decoding: of suffix lookup,
of the head alone, and of both, which is the default. A draft token of the head takes the given
share of a plain step, and t(k) grows by the given share a row, or as it was measured for the demo
model stretched 8 times in fp16 (Zen 3 without AVX-512, 2 cores). With --checked, the policy asks
the head beside what was looked up where it takes less than that share of what these rows cost; with
0, only where the head's rounds were better. All of it is simulated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import read_prompts, report

import edge_spec
from edge_spec.control import adaptive
from edge_spec.control.cost import RowCosts
from edge_spec.control.policy import Policy, RoundPlan
from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.acceptance import LearntAcceptance
from edge_spec.drafters.draft.ahead import AheadChoice
from edge_spec.drafters.draft.candidates import PRIORS, Line
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import Growth, nothing
from edge_spec.engine.decoder import Decoder
from edge_spec.placement.replay import Charged, DraftCost, Recording, VirtualClock, replay

MOST_DRAFT_TOKENS = 8
PLAIN_S = 0.12
MEASURED = {1: 1, 2: 1.23, 3: 1.18, 4: 1.21, 5: 1.35, 6: 1.4, 8: 1.66, 10: 1.75, 12: 1.88, 16: 2.26}
SLOPES = (0.03, 0.1, 0.15)
DRAFT_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2)  # of a plain step
SUFFIX = DraftCost(200e-6, 20e-6, 100e-6)


Drafted = list[tuple[list[int], list[int]]]  # tokens and their kinds, after each token of a text


class AsksAfterEveryToken:
    """A policy that verifies nothing of what it asks for."""

    def __init__(self) -> None:
        self.kinds: list[int] = []  # of the first choice of each pass of the head
        self.drafted: Drafted = []

    def begin(self, num_prompt: int = 0) -> None:
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

    texts = []
    with (
        patch.object(EagleNetwork, "likeliest", noted),
        patch.object(Decoder, "__init__", asked),
        edge_spec.load(arguments.model, draft=str(arguments.head), runtime="ort") as engine,
    ):
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
    """Drafts what a head has drafted there.

    drafted: by prompt.
    """

    name = "eagle"
    traits = DrafterTraits(head="eagle")

    def __init__(
        self, drafted: dict[tuple[int, ...], Drafted], clock: VirtualClock, token_s: float
    ) -> None:
        self._of_texts, self._clock, self._token_s = drafted, clock, token_s
        self._acceptance = LearntAcceptance(PRIORS)
        self._growth = nothing(0)
        self._drafted: Drafted = []
        self._position = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafted, self._position = self._of_texts[tuple(prompt)], 0

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        tokens, kinds = self._drafted[self._position]
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


def speedup(
    texts: Sequence[dict[str, Any]], names: str, pass_s: Callable[[int], float], token_s: float
) -> float:
    """Returns the speedup over plain decoding."""

    def speculate(clock: VirtualClock) -> tuple[list[Drafter], Policy]:
        drafted = {tuple(text["prompt"]): text["drafted"] for text in texts}
        of_name: dict[str, Drafter] = {
            "suffix": Charged(SuffixDrafter(), SUFFIX, clock),
            "head": RecordedHead(drafted, clock, token_s),
        }
        costs = RowCosts({rows: pass_s(rows) for rows in (1, 2, 4, 8, 16)})
        policy = adaptive.AdaptivePolicy(costs, {}, {"suffix"}, branches=False, clock=clock)
        return [of_name[name] for name in names.split("+")], policy

    vocab_size = 1 + max(max(text["prompt"] + text["tokens"]) for text in texts)
    all_stats = replay(
        [recording_of(text) for text in texts], vocab_size, speculate, lambda rows, _: pass_s(rows)
    )
    seconds = sum(stats.predicted_ms for stats in all_stats) / 1e3
    return sum(stats.predicted_n for stats in all_stats) * pass_s(1) / seconds


def recording_of(text: dict[str, Any]) -> Recording:
    tokens = np.array(text["tokens"], np.int32)[:, None]
    gaps = np.zeros(tokens.shape, np.float32)
    return Recording(text["category"], tuple(text["prompt"]), tuple(text["tokens"]), tokens, gaps)


def measured(rows: int) -> float:
    return PLAIN_S * float(np.interp(rows, list(MEASURED), list(MEASURED.values())))


def sloped(slope: float) -> Callable[[int], float]:
    return lambda rows: PLAIN_S * (1 + slope * (rows - 1))


def replay_all(arguments: argparse.Namespace) -> None:
    adaptive._CHECKED = arguments.checked
    texts = json.loads(arguments.file.read_text(encoding="utf-8"))[: arguments.count]
    curves = {"measured": measured, **{f"{slope} a row": sloped(slope) for slope in SLOPES}}
    results: dict[str, Any] = {}
    print("| t(k) | a draft token | suffix | the head | both |\n|---|---|---|---|---|")
    for name, pass_s in curves.items():
        for share in DRAFT_TOKEN:
            arms = {
                names: speedup(texts, names, pass_s, share * PLAIN_S)
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
    replaying.add_argument("--checked", type=float, default=adaptive._CHECKED)
    replaying.add_argument("--json", type=Path)
    replaying.set_defaults(run=replay_all)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
