"""Compares what the policies of several installations do in live rounds.

    python benchmarks/policy_rounds.py MODEL --python OLD/bin/python --python NEW/bin/python \\
        --prompts FILE [--count 6] [--tokens 64] [--repeat 4] [--draft MODEL] [--json FILE]

Each installation answers in a process of its own with an empty cache, in turns with the others and
with plain decoding. Passes of one process differ from another's by up to a tenth, so each round is
also charged with the median pass of its width over all processes, plain steps after others and
after wider passes apart, and with its own time around that: "of plain, normalized".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_MOST_AROUND_S = 2e-3  # of a round that another process has delayed


class Round(NamedTuple):
    rows: int
    tokens: int
    pass_s: float
    around_s: float  # all else: drafting, verifying, learning


def answer_prompts(model: str, options: dict[str, Any]) -> None:
    """Answers each line of stdin, and writes its rounds and text as a line."""
    import edge_spec  # the installation's that answers
    from edge_spec.engine.decoder import Decoder

    rounds: list[Round] = []
    observe = Decoder._observe

    def noted(decoder: Decoder, stats: Any) -> None:
        start = decoder.clock()
        observe(decoder, stats)
        learning_s = decoder.clock() - start
        around_s = stats.total_s - stats.forward_s + learning_s
        rounds.append(Round(stats.num_rows, stats.num_tokens, stats.forward_s, around_s))

    Decoder._observe = noted  # type: ignore[assignment, method-assign]
    with edge_spec.load(model, **options) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            rounds.clear()
            text = engine.chat(asked["prompt"], max_tokens=asked["tokens"]).text
            print(json.dumps({"rounds": rounds, "text": text}), flush=True)


class Installation:
    """One that answers in a process of its own."""

    def __init__(self, name: str, python: str, model: str, options: dict[str, Any]) -> None:
        self.name = name
        self.answers: list[list[Round]] = []
        self.texts: list[str] = []
        self._cache = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [python, __file__, "--answer", model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "EDGE_SPEC_CACHE": self._cache.name},
        )
        self._read()

    def ask(self, prompt: Any, tokens: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._read())
        self.answers.append([Round(*each) for each in found["rounds"]])
        self.texts.append(found["text"])

    def close(self) -> None:
        self._process.communicate()
        self._cache.cleanup()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended; what it wrote above says why")
        return line


def widths(rounds: list[Round]) -> list[tuple[int, bool]]:
    """Of each round: its rows, and whether it is a plain step after another one."""
    before = [1, *(each.rows for each in rounds[:-1])]
    return [(each.rows, each.rows == last == 1) for each, last in zip(rounds, before, strict=True)]


def token_s(rounds: list[Round], pass_s: dict[tuple[int, bool], float] | None) -> float:
    """pass_s: of passes, instead of their own."""
    seconds = 0.0
    for each, width in zip(rounds, widths(rounds), strict=True):
        seconds += each.pass_s if pass_s is None else pass_s[width]
        seconds += min(each.around_s, _MOST_AROUND_S)
    return seconds / sum(each.tokens for each in rounds)


def compare(asked: list[Installation]) -> dict[str, Any]:
    seen: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for each in asked:
        for rounds in each.answers:
            for one, width in zip(rounds, widths(rounds), strict=True):
                seen[width].append(one.pass_s)
    pass_s = {width: median(found) for width, found in seen.items()}
    plain = asked[0]
    found: dict[str, Any] = {}
    if (1, False) in pass_s:  # a graph that is built again, say
        found["passes"] = {
            "plain_step_ms": 1e3 * pass_s[1, True],
            "after_a_wider_pass_ms": 1e3 * pass_s[1, False],
        }
    for each in asked:
        by_text = [token_s(rounds, pass_s) for rounds in each.answers]
        plain_by_text = [token_s(rounds, pass_s) for rounds in plain.answers]
        own = [token_s(rounds, None) for rounds in each.answers]
        weights = [sum(one.tokens for one in rounds) for rounds in each.answers]
        ratios = [before / now for before, now in zip(plain_by_text, by_text, strict=True)]
        found[each.name] = {
            "tokens_per_s": sum(weights) / sum(s * n for s, n in zip(own, weights, strict=True)),
            "of_plain_normalized": sum(s * n for s, n in zip(plain_by_text, weights, strict=True))
            / sum(s * n for s, n in zip(by_text, weights, strict=True)),
            "worst": min(ratios),
            "around_passes_ms": 1e3
            * median(one.around_s for rounds in each.answers for one in rounds),
            "slower_than_0.97": sum(ratio < 0.97 for ratio in ratios),
            "texts": len(ratios),
            "texts_that_differ": sum(
                one != other for one, other in zip(each.texts, plain.texts, strict=True)
            ),
        }
    return found


def main() -> None:
    if sys.argv[1:2] == ["--answer"]:
        answer_prompts(sys.argv[2], json.loads(sys.argv[3]))
        return
    from common import read_prompts, report  # with this repository's edge_spec

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--python", action="append", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--draft")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = {"draft": given.draft} if given.draft else {}
    asked = [Installation("plain", given.python[0], given.model, {"drafter": "none"})]
    asked += [Installation(python, python, given.model, options) for python in given.python]
    prompts = read_prompts(given.prompts)
    chosen = prompts[:: max(1, len(prompts) // given.count)][: given.count]
    for number in range(given.repeat):
        for entry in chosen:
            for each in asked if number % 2 else reversed(asked):
                each.ask(entry["prompt"], given.tokens)
    found = compare(asked)
    for each in asked:
        each.close()
    for name, figures in found.items():
        told = (f"{key} {value:.3f}" for key, value in figures.items())
        print(name, *told, sep="\n  ")
    if given.json:
        report(found, given.json)


if __name__ == "__main__":
    main()
