"""Measures several conversations at once on one model, with and without drafting.

    python benchmarks/parallel.py
    python benchmarks/parallel.py --model target.gguf --draft draft.gguf --parallel-rows 8

Each conversation is a fork of one engine in a thread of its own. All begin together and answer
prompts until the last one has answered `--prompts-each`; only what is written while all are at work
counts. Arms take turns: `plain` and `auto`, whose passes are shared where the model can; `plain
apart` and `auto apart`, each in passes of its own; with --parallel-rows also `limited`, where all
together score at most that many rows a pass. Prints tokens a second of all together and of each,
rows a round, and how many texts are those written alone by plain decoding.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from threading import Barrier
from typing import Any

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.engine.engine import Engine
from edge_spec.engine.passes import OwnPasses
from edge_spec.engine.shared_passes import SharedPasses

ARMS = {"plain": "none", "auto": "auto", "plain apart": "none", "auto apart": "auto"}  # drafters
LIMITED = "limited"


@dataclass
class Answers:
    """Holds the answers of one conversation."""

    texts: list[tuple[int, list[int]]] = field(default_factory=list)  # prompt and tokens
    written: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    rounds: int = 0
    rows: int = 0


def converse(
    engine: Engine, prompts: list[list[int]], first: int, count: int, tokens: int, start: Barrier
) -> Answers:
    answers = Answers()
    start.wait()
    for number in islice(cycle(range(len(prompts))), first, first + count):
        running = engine.generate(prompts[number], max_tokens=tokens, stream=True)
        for chunk in running:
            answers.written.append((time.perf_counter(), len(chunk.tokens)))
        result = running.result
        answers.texts.append((number, [token.id for token in result.tokens]))
        answers.rounds += result.stats.rounds
        answers.rows += result.stats.rounds + result.stats.draft_n
    return answers


def run(
    engine: Engine, arm: str, num: int, prompts: list[list[int]], arguments: argparse.Namespace
) -> list[Answers]:
    limit = arguments.parallel_rows if arm == LIMITED else None
    parts = engine.parts
    passes = OwnPasses() if arm.endswith("apart") else parts.passes
    speculation_factory = replace(parts.speculation_factory, parallel_rows=limit)
    engine.parts = replace(parts, speculation_factory=speculation_factory, passes=passes)
    forks = [engine.fork() for _ in range(num)]
    engine.parts = parts
    start = Barrier(num)
    try:
        for fork in forks:
            fork.set_drafter(ARMS.get(arm, "auto"))
        with ThreadPoolExecutor(num) as threads:
            each = [
                threads.submit(
                    converse, fork, prompts, at, arguments.prompts_each, arguments.tokens, start
                )
                for at, fork in enumerate(forks)
            ]
            return [answers.result() for answers in each]
    finally:
        for fork in forks:
            fork.close()


def rates(answers: list[Answers]) -> list[float]:
    """Tokens a second of each conversation, while all were at work."""
    begin = max(each.written[0][0] for each in answers)
    end = min(each.written[-1][0] for each in answers)
    if end <= begin:
        raise SystemExit("the conversations did not overlap: give more --tokens")
    return [
        sum(count for at, count in each.written if begin < at <= end) / (end - begin)
        for each in answers
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--conversations", default="1,2,4")
    parser.add_argument("--parallel-rows", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--prompts-each", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with open_engine(
        arguments.model,
        runtime=arguments.runtime,
        draft_runtime=arguments.runtime,
        draft=arguments.draft,
        threads=arguments.threads,
        device=arguments.device,
    ) as engine:
        entries = read_prompts(arguments.prompts)
        counts = [int(count) for count in arguments.conversations.split(",")]
        used = entries[: max(counts) + arguments.prompts_each - 1]
        prompts = [engine.chat_prompt(entry["prompt"]) for entry in used]
        engine.set_drafter("none")
        alone = [
            [token.id for token in engine.generate(prompt, max_tokens=arguments.tokens).tokens]
            for prompt in prompts
        ]
        engine.set_drafter("auto")
        print(f"{'':16s} tokens/s of all   of each   rows a round   equal texts")
        for num in counts:
            if isinstance(engine.parts.passes, SharedPasses):
                engine.parts.passes.prepare_for(num)
                engine.parts.passes.settle()
            arms = [*ARMS, LIMITED] if arguments.parallel_rows else [*ARMS]
            found: dict[str, list[list[Answers]]] = {arm: [] for arm in arms}
            for _ in range(arguments.repeats):
                for arm in arms:
                    found[arm].append(run(engine, arm, num, prompts, arguments))
            for arm, runs in found.items():
                results[f"{num} {arm}"] = summary = summarize(runs, alone)
                print(
                    f"{num:3d} {arm:12s}{summary['total']:16.1f}{summary['each']:10.1f}"
                    f"{summary['rows']:15.2f}{summary['equal']:8d}/{summary['texts']}"
                )
    report({"conversations": results}, arguments.json)


def summarize(runs: list[list[Answers]], alone: list[list[int]]) -> dict[str, Any]:
    everything = [answers for answers_of_run in runs for answers in answers_of_run]
    texts = [pair for answers in everything for pair in answers.texts]
    of_each = [rates(answers) for answers in runs]
    return {
        "total": median(sum(each) for each in of_each),
        "each": median(rate for each in of_each for rate in each),
        "rows": sum(a.rows for a in everything) / sum(a.rounds for a in everything),
        "equal": sum(text == alone[number] for number, text in texts),
        "texts": len(texts),
    }


if __name__ == "__main__":
    main()
