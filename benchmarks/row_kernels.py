"""Our kernels for few rows beside llama.cpp's own, in turns in one process, on any GGUF file.

    python benchmarks/row_kernels.py FILE.gguf...             # all tables of these files
    python benchmarks/row_kernels.py FILE.gguf --parts widths,bits --table avx2
    python benchmarks/row_kernels.py --types --layers 8       # the demo requantized; random weights

Prints Markdown: the time of a pass of each width (all rows scored; medians), how fast prompts are
read, which rows have other bits than single rows, perplexity, load time and memory. The last two
have a process of their own for each side. --types: with random weights in the shapes of 3B and 7B
models, of which --layers takes the first few where memory or time is short. --table: one of the
tables of kernels that this processor has, instead of the fastest. `--parts float32`, which takes
four bytes a weight of disk and memory: how far both are from the same weights in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
import real_models
from gguf import GGUFReader
from gguf.constants import LlamaFileType
from llama_loop import LlamaLoop, resident_mb
from random_gguf import SHAPES, write_random
from row_measures import (
    WIDTHS,
    compare_bits,
    compare_perplexity,
    compare_with_float32,
    measure_prompt,
    measure_widths,
)

from edge_spec.exporters.gguf.export import quantize

PARTS = ("widths", "prompt", "bits", "perplexity", "memory")
SIDES = {"llama.cpp": False, "ours": True}
TEXT = ("README.md", "docs/how-it-works.md", "docs/models.md", "docs/drafters.md")
PERPLEXITY_TOKENS = 2000
COMPARED_TOKENS = 1024  # with the weights in float32
MARGIN_TOKENS = 64
DEMO_TYPES = ("MOSTLY_Q4_0", "MOSTLY_Q8_0", "MOSTLY_Q5_K_S")
RANDOM_TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K")


def measure_memory(path: str, threads: int, repetitions: int) -> Any:
    """Returns load time and memory of each side, each in new processes."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(repetitions):
        for side in SIDES:
            command = [sys.executable, __file__, path, "--worker", side, "--threads", str(threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        side: {name: median(each[name] for each in runs) for name in runs[0]}
        for side, runs in found.items()
    }


def work(path: str, side: str, threads: int) -> None:
    before = resident_mb()
    loop = LlamaLoop(path, SIDES[side], threads, 2048)
    loop.forward([1] * 512, all_rows=False)
    loop.forward([1] * 8)
    after = resident_mb()
    found = {name: after[name] - before[name] for name in after}
    print(json.dumps({"load_s": loop.load_s, **found}))


def measure(path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"mb": Path(path).stat().st_size / 1e6, "read_mb": _read_mb(path)}
    parts = arguments.parts.split(",")
    if "memory" in parts:
        found["memory"] = measure_memory(path, arguments.threads, 3)
    if set(parts) == {"memory"}:
        return found
    room = max(2048, *arguments.contexts) + 2 * MARGIN_TOKENS
    sides = {
        side: LlamaLoop(path, ours, arguments.threads, room)
        for side, ours in SIDES.items()
        if side in arguments.sides.split(",")
    }
    found["left"] = sum(sum(loop.left.values()) for loop in sides.values() if loop.ours)
    some = next(iter(sides.values()))
    text = some.tokens_of(_text())
    tokens = text or np.random.default_rng(0).integers(0, some.vocab_size, 4096).tolist()
    repetitions = arguments.repetitions
    if "widths" in parts:
        found["widths"] = {
            context: measure_widths(sides, tokens, context, repetitions)
            for context in arguments.contexts
        }
    if "prompt" in parts:
        found["prompt"] = {
            length: measure_prompt(sides, tokens, length, 3 if length < 1024 else 1)
            for length in arguments.prompts
        }
    if "bits" in parts:
        found["bits"] = {
            side: compare_bits(loop, tokens, 256, arguments.threads) for side, loop in sides.items()
        }
    if "perplexity" in parts and text:
        found["text"] = compare_perplexity(sides, text[:PERPLEXITY_TOKENS])
    if "float32" in parts and text:
        with tempfile.TemporaryDirectory() as folder:
            exact = Path(folder) / "float32.gguf"
            quantize(Path(path), exact, LlamaFileType.ALL_F32, lambda what, fraction: None)
            reference = LlamaLoop(str(exact), False, arguments.threads, room)
            found["float32"] = compare_with_float32(sides, reference, text[:COMPARED_TOKENS])
            reference.close()
    for loop in sides.values():
        loop.close()
    return found


def _read_mb(path: str) -> float:
    """Returns what a pass reads: all but an embedding that is not the output matrix, too."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight")
    return sum(sizes.values()) / 1e6


def _text() -> str:
    root = Path(common.__file__).parents[1]
    return "\n".join((root / page).read_text("utf-8") for page in TEXT)


def print_tables(name: str, found: dict[str, Any]) -> None:
    read_mb = found["read_mb"]
    print(f"\n## {name}, {found['mb']:.0f} MB, of which a pass reads {read_mb:.0f}\n")
    if found.get("left"):
        print(f"{found['left']} matrices are of types that llama.cpp keeps.\n")
    for context, sides in found.get("widths", {}).items():
        print(f"| ms at {context} tokens | {' | '.join(map(str, WIDTHS))} |")
        print("|---" * (1 + len(WIDTHS)) + "|")
        for side, ms in sides.items():
            print(f"| {side} | {' | '.join(f'{ms[width]:.1f}' for width in WIDTHS)} |")
            steps = (f"{ms[width] / ms[1]:.2f}" for width in WIDTHS)
            print(f"| in steps of its own | {' | '.join(steps)} |")
            speeds = (f"{read_mb / ms[width]:.1f}" for width in WIDTHS)
            print(f"| GB/s of weights | {' | '.join(speeds)} |")
        if len(sides) == 2:
            theirs, ours = sides.values()
            ratios = (f"{ours[width] / theirs[width]:.2f}" for width in WIDTHS)
            print(f"| ours over llama.cpp's | {' | '.join(ratios)} |")
        print()
    for length, rates in found.get("prompt", {}).items():
        said = ", ".join(f"{side} {rate:.0f}" for side, rate in rates.items())
        print(f"- Prompt of {length}, tokens/s: {said}")
    for side, divisions in found.get("bits", {}).items():
        wrong = {name: of for name, of in divisions.items() if of[0]}
        worst = max((of[1] for of in divisions.values()), default=0.0)
        said = f"differ in {', '.join(wrong)}, by up to {worst:.2g}" if wrong else "equal in all"
        print(f"- Bits of single rows in {len(divisions)} divisions, {side}: {said}")
    if "text" in found:
        text = found["text"]
        said = ", ".join(f"{side} {value:.4f}" for side, value in text["perplexity"].items())
        print(f"- Perplexity of {text['tokens']} tokens: {said}")
        if "more" in text:
            print(
                f"  ({text['more']:+.3%} ± {text['more_error']:.3%}; a row's logits differ by "
                f"{text['apart']['median']:.2g} of their standard deviation in the median, "
                f"{text['apart']['largest']:.2g} in the worst row)"
            )
    if "float32" in found:
        said = ", ".join(f"{side} {kl:.6f} ± {e:.6f}" for side, (kl, e) in found["float32"].items())
        print(f"- Divergence from the weights in float32, nats: {said}")
    for side, of in found.get("memory", {}).items():
        said = ", ".join(f"{name} {of[name]:.0f} MB" for name in of if name != "load_s")
        print(f"- Loaded by {side} in {of['load_s']:.2f} s: {said}")
    sys.stdout.flush()


def made_files(folder: Path, layers: int | None) -> Iterator[Path]:
    """Makes the demo in other types and files of random weights; each is gone when the next one is
    asked for."""
    from edge_spec.models.source import fetch_demo_model

    demo = fetch_demo_model(lambda what, fraction: None)
    for type_name in DEMO_TYPES:
        path = folder / f"demo {type_name.removeprefix('MOSTLY_')}"
        quantize(demo, path, LlamaFileType[type_name], lambda what, fraction: None)
        yield path
        path.unlink()
    for size, shape in SHAPES.items():
        for type_name in RANDOM_TYPES:
            taken = min(layers or shape.layers, shape.layers)
            path = folder / f"{size} {type_name} ({taken} of {shape.layers} layers, random weights)"
            write_random(path, shape, type_name, taken)
            yield path
            path.unlink()


def _file(name: str) -> Path:
    return Path(real_models.named(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=_file, nargs="*")
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--table")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1500])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        os.environ["EDGE_SPEC_ROWS_KERNELS"] = arguments.table
    if arguments.worker:
        return work(str(arguments.files[0]), arguments.worker, arguments.threads)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = made_files(Path(folder), arguments.layers) if arguments.types else ()
        for path in chain(arguments.files, made):
            results[path.name] = measure(str(path), arguments)
            print_tables(path.name, results[path.name])
    common.report({"rows": results}, arguments.json)
    return None


if __name__ == "__main__":
    main()
