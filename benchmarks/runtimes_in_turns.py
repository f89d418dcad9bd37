"""OpenVINO against other runtimes on this CPU, in turns: passes, prompt, and default drafting.

    python benchmarks/runtimes_in_turns.py [MODEL] [--runtimes openvino ort llamacpp]
    python benchmarks/runtimes_in_turns.py [MODEL] --static BUNDLE

--static adds a bundle of `export --format onnx-static` on ort and on openvino's NPU, which
EDGE_SPEC_NPU_STAND_IN=cpu puts the processor in the place of.

Prints a markdown table: medians of a pass over 1, 2, 4, 8 and 16 rows after 256 tokens, of reading
these, and tokens a second without drafting and as set up by default, with whether the two texts are
equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from common import open_engine

from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine

ROWS = (1, 2, 4, 8, 16)
PROMPT_TOKENS = 256
QUESTION = "List ten animals with four legs, and say of each where it lives."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runtimes", nargs="+", default=["openvino", "ort", "llamacpp"])
    parser.add_argument("--static", metavar="BUNDLE")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()

    places = {name: (arguments.model, {"runtime": name}) for name in arguments.runtimes}
    if arguments.static:
        npu = {"runtime": "openvino", "device": "npu"}
        places |= {"ort, static": (arguments.static, {"runtime": "ort"})}
        places |= {"openvino npu, static": (arguments.static, npu)}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in places}
    texts: dict[str, set[str]] = {name: set() for name in places}
    engines = {
        name: (open_engine(model, **options, drafter="none"), open_engine(model, **options))
        for name, (model, options) in places.items()
    }
    for _ in range(arguments.repetitions):
        for name, (plain, drafting) in engines.items():
            for what, value in passes(plain).items():
                found[name].setdefault(what, []).append(value)
            for what, engine in (("plain tokens/s", plain), ("drafting tokens/s", drafting)):
                text, rate = answered(engine, arguments.tokens)
                found[name].setdefault(what, []).append(rate)
                texts[name].add(text)
    for plain, drafting in engines.values():
        plain.close()
        drafting.close()
    columns = list(next(iter(found.values())))
    print("| runtime | " + " | ".join(columns) + " | texts equal |")
    print("|" + "---|" * (len(columns) + 2))
    for name, values in found.items():
        cells = [f"{median(values[column]):.2f}" if column in values else "" for column in columns]
        equal = "yes" if len(texts[name]) == 1 else "NO"
        print(f"| {name} | " + " | ".join(cells) + f" | {equal} |")


def passes(engine: Engine) -> dict[str, float]:
    """Milliseconds of the prompt, and of a pass of each width."""
    session = engine.parts.model.open_session()
    tokens = list(range(100, 100 + PROMPT_TOKENS))
    taken = {f"prompt of {PROMPT_TOKENS}, ms": timed_ms(lambda: session.prefill(tokens))}
    for rows in (each for each in ROWS if each <= engine.parts.model.capabilities.max_rows):
        tree = TokenTree.chain(1, tokens[: rows - 1])
        session.forward(tree)  # the first of a width may set up what it needs
        taken[f"t({rows}), ms"] = timed_ms(lambda tree=tree: session.forward(tree))
    session.close()
    return taken


def timed_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def answered(engine: Engine, tokens: int) -> tuple[str, float]:
    """The answer, and tokens a second after the prompt."""
    start = time.perf_counter()
    result = engine.generate(engine.chat_prompt(QUESTION), max_tokens=tokens)
    seconds = time.perf_counter() - start - result.stats.prompt_ms / 1e3
    return result.text, len(result.tokens) / seconds


if __name__ == "__main__":
    main()
