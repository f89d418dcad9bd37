"""What suffix lookup brings beside a draft model, and what a draft that does not pay takes from it.

    python benchmarks/beside_draft.py [--each 2] [--tokens 96] [--json FILE]

The demo model in 8 bits writes texts, and what it is most sure of in 4 bits is recorded along them:
the draft. Then the real loop, drafters and policy decode the texts again on a virtual clock, each
text in a session that knows the costs and nothing of the draft. Targets have the t(k) of
TARGETS_MS, a draft token takes a share of their plain step, and a share of the draft's tokens is
exchanged for others. Prints the speed over plain decoding of all texts and of the worst one. It is
simulated, and the same on every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cascade import PolicyStage
from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import Stats
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.engine import Engine
from edge_spec.testing.pair_replay import PairClock, PairCosts, VirtualModel, tokens_per_s

# Milliseconds by rows, as measured on 2 cores (AMD EPYC Zen 4, AVX-512 VNNI): the demo model in
# 4 bits, and 8 times as long in 8 bits and in fp16 (benchmarks/stretched.py).
TARGETS_MS: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "int4": {1: 4.8, 2: 5.2, 4: 6.8, 8: 10.2, 16: 18.0},
        "8x int8": {1: 52.4, 2: 69.8, 4: 85.3, 8: 124.5},
        "8x fp16": {1: 190.0, 2: 195.0, 4: 215.0, 5: 228.0, 8: 270.0, 16: 400.0},
    }
)
DRAFTS = ((0.06, 0.0), (0.06, 0.4), (0.2, 0.0), (0.2, 0.4), (0.4, 0.0), (0.4, 0.6))
WAYS = ("suffix", "draft-model", "cascade", "suffix,draft-model", "suffix,cascade")
_MORE_ROWS = {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.1, 16: 3.8}  # of a draft's pass, in its steps
_LIMIT, _MAX_ROWS, _CONTEXT = 15, 64, 1 << 16
_SURE = 30.0  # logit of the target's choice


@dataclass(frozen=True)
class Recorded:
    """tokens: prompt and answer; drafted, certainty: of each token of the answer, what the draft
    had in its place and how sure it was. All ids are below `vocab_size`."""

    tokens: list[int]
    prompt_n: int
    drafted: list[int]
    certainty: list[float]
    vocab_size: int

    def says(self, wrong: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """[tokens, vocab] logits of target and draft. wrong: the share of the draft's tokens that
        are exchanged."""
        random = np.random.default_rng(seed)
        target, draft = np.zeros((2, len(self.tokens), self.vocab_size), np.float32)
        choices = zip(self.drafted, self.certainty, strict=True)
        for place, (token, sure) in enumerate(choices, start=self.prompt_n):
            target[place, self.tokens[place]] = _SURE
            if random.random() < wrong:
                token, sure = int(random.integers(self.vocab_size)), 0.6 * sure
            sure = min(max(sure, 1.5 / self.vocab_size), 0.999)
            draft[place, token] = np.log(sure * (self.vocab_size - 1) / (1 - sure))
        return target, draft


def record(each: int, num_tokens: int) -> list[Recorded]:
    prompts = read_prompts(OWN_PROMPTS, each)
    with (
        open_engine("smollm2", runtime="ort", quantization="int8", drafter="none") as target,
        open_engine("smollm2", runtime="ort", drafter="none") as draft,
    ):
        return [_recorded(target, draft, entry["prompt"], num_tokens) for entry in prompts]


def _recorded(target: Engine, draft: Engine, text: str, num_tokens: int) -> Recorded:
    prompt = target.chat_prompt(text)
    answer = [token.id for token in target.generate(prompt, max_tokens=num_tokens).tokens]
    session = draft.parts.model.open_session()
    session.prefill(prompt[:-1])
    drafted, certainty = [], []
    for token in [prompt[-1], *answer[:-1]]:
        logits = session.forward(TokenTree.chain(token)).logits[0]
        session.commit([0])
        drafted.append(int(logits.argmax()))
        certainty.append(float(1 / np.exp(logits - logits.max()).sum()))
    session.close()
    print(".", end="", flush=True)
    ids: dict[int, int] = {}  # fewer and smaller ones: what they mean does not matter
    tokens, found = (
        [ids.setdefault(token, len(ids)) for token in each]
        for each in ([*prompt, *answer], drafted)
    )
    return Recorded(tokens, len(prompt), found, certainty, len(ids) + 1)


def decoded(text: Recorded, way: str, target_s: RowCosts, draft_s: RowCosts, wrong: float) -> Stats:
    """Decodes one text in a session of its own."""
    clock = PairClock(PairCosts(target_s.at, draft_s.at, 0.0, None))
    written, drafted = text.says(wrong, seed=len(text.tokens))
    draft = VirtualModel(text.tokens, drafted, clock.draft_pass)
    drafters = [_drafter(name, draft, text, draft_s, clock) for name in way.split(",")]
    known = dict.fromkeys(("draft-model", "cascade"), draft_s.at(1))
    policy = AdaptivePolicy(
        deepcopy(target_s), known, {"suffix"}, _LIMIT, branches=False, probes=False, clock=clock
    )
    session = VirtualModel(text.tokens, written, clock.target_pass).open_session()
    prompt = text.tokens[: text.prompt_n]
    session.prefill(prompt[:-1])
    for drafter in drafters:
        drafter.prepare(prompt)
    stats = Stats(prompt_n=len(prompt))
    limits = GenerationLimits(len(text.tokens) - len(prompt), frozenset(), _CONTEXT, _MAX_ROWS)
    decoder = Decoder(session, drafters, policy, clock=clock)
    for _ in decoder.decode(prompt, Sampler(SamplingParams(), prompt), limits, stats.observe):
        pass
    return stats


def _drafter(
    name: str, draft: VirtualModel, text: Recorded, draft_s: RowCosts, clock: PairClock
) -> Drafter:
    if name == "suffix":
        return SuffixDrafter()
    stage = None
    if name == "cascade":
        inner = AdaptivePolicy(deepcopy(draft_s), {}, branches=False, probes=False, clock=clock)
        stage = PolicyStage([SuffixDrafter()], inner, _MAX_ROWS, clock)
    return DraftModelDrafter(draft, draft.open_session(), text.vocab_size, stage, name=name)


def speeds(texts: Sequence[Recorded], target: str, share: float, wrong: float) -> dict[str, Any]:
    """Of each way over plain decoding: all texts together, and the worst one."""
    target_s = RowCosts({rows: ms / 1e3 for rows, ms in TARGETS_MS[target].items()})
    step_s = share * target_s.at(1)
    draft_s = RowCosts({rows: more * step_s for rows, more in _MORE_ROWS.items()})
    found = {}
    for way in WAYS:
        stats = [decoded(text, way, target_s, draft_s, wrong) for text in texts]
        rates = [target_s.at(1) * tokens_per_s(each) for each in (stats, *([one] for one in stats))]
        found[way] = {"all": rates[0], "worst": min(rates[1:])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=2, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts = record(arguments.each, arguments.tokens)
    right = np.mean([a == b for text in texts for a, b in _pairs(text)])
    print(f"\n{len(texts)} texts, the draft has {right:.0%} of the tokens; all (the worst)")
    print("| target | a draft token | exchanged | " + " | ".join(WAYS) + " |")
    results = {}
    for target in TARGETS_MS:
        for share, wrong in DRAFTS:
            found = speeds(texts, target, share, wrong)
            results[f"{target} {share} {wrong}"] = found
            cells = (f"{each['all']:.2f} ({each['worst']:.2f})" for each in found.values())
            print(f"| {target} | {share} | {wrong:.0%} | {' | '.join(cells)} |", flush=True)
    report({"beside_draft": results}, arguments.json)


def _pairs(text: Recorded) -> list[tuple[int, int]]:
    return list(zip(text.tokens[text.prompt_n :], text.drafted, strict=True))


if __name__ == "__main__":
    main()
