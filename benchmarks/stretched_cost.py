"""What the pairs of benchmarks/stretched.py are worth: costs, agreement, and that they are honest.

    python benchmarks/stretched_cost.py cost                     # t(k) of targets, c of drafts
    python benchmarks/stretched_cost.py agreement --prompts FILE
    python benchmarks/stretched_cost.py check                    # stretching changes nothing

Drafts of 2 and 3 bits are stored in 4 bits: their agreement is that of 2 or 3 bits, their cost
that of 4. `agreement` scores the greedy texts that the target itself writes for some prompts:
how often the draft's likeliest token is the target's, and the mean of sum(min(p, q)), the share of
sampled drafts that are accepted at temperature 1 (Leviathan et al. 2023, corollary 3.6).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import OWN_PROMPTS, medians, open_engine, read_prompts, report
from rows import WIDTHS, ask, start
from stretched import DRAFTS, TARGETS, make_draft, make_target

from edge_spec.exporters.parity import score_text

RUNTIMES = {"onnx": "ort", "gguf": "llamacpp"}
SHOWN_WIDTHS = WIDTHS[:-1]


def measure_costs(arguments: Any) -> dict[str, Any]:
    """Measures each way to store a target: all its sizes and both drafts, interleaved."""
    results: dict[str, Any] = {}
    for target in arguments.targets:
        format, quantization = target.split(":")
        models = {
            f"{times}x {quantization}": (make_target(times, format, quantization), format)
            for times in arguments.times
        }
        models |= {f"draft {RUNTIMES[f]}": (make_draft(4, f), f) for f in RUNTIMES}
        workers = {
            name: start(str(path), RUNTIMES[format]) for name, (path, format) in models.items()
        }
        seconds: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in workers}
        for repetition in range(arguments.repetitions + 2):
            for name, worker in workers.items():
                for width, taken in zip(WIDTHS, ask(worker, arguments.context), strict=True):
                    if repetition >= 2:  # the first passes bind their buffers
                        seconds[name][width].append(taken)
        for worker in workers.values():
            worker.communicate()
        results[target] = {
            name: {width: taken * 1e3 for width, taken in medians(of_model).items()}
            for name, of_model in seconds.items()
        }
        print_costs(target, results[target])
    return results


def print_costs(target: str, ms: dict[str, dict[int, float]]) -> None:
    """Milliseconds, multiples of one row, and the cost ratio c of both drafts."""
    drafts = [name for name in ms if name.startswith("draft")]
    print(f"\n{target:16s}" + "".join(f"{width:>15d}" for width in SHOWN_WIDTHS), *drafts, sep="  ")
    for name, of_width in ms.items():
        cells = "".join(f"{of_width[w]:8.2f} ({of_width[w] / of_width[1]:4.2f})" for w in WIDTHS)
        cells = cells[: 15 * len(SHOWN_WIDTHS)]
        ratios = [f"c {ms[draft][1] / of_width[1]:5.3f}" for draft in drafts if name not in drafts]
        print(f"{name:16s}" + cells, *ratios, sep="     ", flush=True)


def scores(path: Path, format: str, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits [tokens - 1, vocab] of each text."""
    with open_engine(str(path), runtime=RUNTIMES[format], drafter="none") as engine:
        return [score_text(engine.parts.model, text) for text in texts]


def measure_agreement(arguments: Any) -> dict[str, Any]:
    target = make_target(1, "onnx", "int8")  # writes what the stretched ones write: see `check`
    entries = read_prompts(arguments.prompts)
    entries = entries[:: max(1, len(entries) // arguments.count)][: arguments.count]
    prompts, texts = [], []
    with open_engine(str(target), runtime="ort", drafter="none") as engine:
        for entry in entries:
            prompts.append(engine.chat_prompt(entry["prompt"]))
            answer = engine.generate(prompts[-1], max_tokens=arguments.tokens)
            texts.append([*prompts[-1], *(token.id for token in answer.tokens)])
    expected = scores(target, "onnx", texts)
    results = {}
    for draft in arguments.drafts:
        format, bits = draft.split(":")
        found = scores(make_draft(int(bits), format), format, texts)
        same, overlap = [], []
        for prompt, p_logits, q_logits in zip(prompts, expected, found, strict=True):
            p, q = p_logits[len(prompt) - 1 :], q_logits[len(prompt) - 1 :]
            same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
            overlap += np.minimum(_softmax(p), _softmax(q)).sum(axis=1).tolist()
        results[draft] = {"argmax": np.mean(same), "overlap": np.mean(overlap), "rows": len(same)}
        stored = "" if bits == "4" else ", stored in 4"
        print(
            f"{RUNTIMES[format]:9s} {bits} bits{stored:14s} argmax equal {np.mean(same):.3f}, "
            f"sum min(p, q) {np.mean(overlap):.3f} over {len(same)} tokens",
            flush=True,
        )
    return results


def check(arguments: Any) -> dict[str, Any]:
    """Logits of a text and the greedy answer to one prompt, stretched against not stretched."""
    results = {}
    for target in arguments.targets:
        format, quantization = target.split(":")
        answers: dict[int, list[int]] = {}
        logits: dict[int, np.ndarray] = {}
        for times in (1, *(times for times in arguments.times if times != 1)):
            path = make_target(times, format, quantization)
            with open_engine(str(path), runtime=RUNTIMES[format], drafter="none") as engine:
                result = engine.chat("Why is the sky blue?", max_tokens=arguments.tokens)
                answers[times] = [token.id for token in result.tokens]
                prompt = engine.chat_prompt("Why is the sky blue?")
                logits[times] = score_text(engine.parts.model, [*prompt, *answers[1]])
            difference = float(np.abs(logits[times] - logits[1]).max())
            same = answers[times] == answers[1]
            results[f"{times}x {target}"] = {"difference": difference, "same_text": same}
            print(
                f"{times}x {target:10s} logits differ by {difference:.2g} at most, the greedy text "
                f"of {len(answers[1])} tokens {'is the same' if same else 'DIFFERS'}",
                flush=True,
            )
    return results


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: np.ndarray = shifted / shifted.sum(axis=1, keepdims=True)
    return probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "agreement", "check"))
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="FORMAT:QUANTIZATION")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS, help="FORMAT:BITS")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measures = {"cost": measure_costs, "agreement": measure_agreement, "check": check}
    report({arguments.what: measures[arguments.what](arguments)}, arguments.json)


if __name__ == "__main__":
    main()
