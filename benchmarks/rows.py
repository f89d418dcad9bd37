"""t(k): the time to score k rows, all of them through the head.

    python benchmarks/rows.py

Widths are interleaved; prints medians in milliseconds and as multiples of one row.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from common import medians, open_engine, report

from edge_spec.tree import TokenTree

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quant")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    results = {}
    with open_engine(
        arguments.model, quantization=arguments.quant, block_size=arguments.block_size
    ) as engine:
        model = engine.parts.model
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 1 << 16).tolist()
        print("context  " + "".join(f"{width:>14d}" for width in WIDTHS))
        for context in arguments.contexts:
            session = model.open_session()
            session.prefill(tokens[:context])
            seconds = defaultdict[int, list[float]](list)
            for repetition in range(arguments.repetitions + 2):
                for width in WIDTHS:
                    tree = TokenTree.chain(tokens[context], tokens[context + 1 : context + width])
                    start = time.perf_counter()
                    session.forward(tree)
                    if repetition >= 2:  # the first passes bind their buffers
                        seconds[width].append(time.perf_counter() - start)
            session.close()
            ms = {width: time_s * 1e3 for width, time_s in medians(seconds).items()}
            cells = (f"{ms[width]:7.2f} ({ms[width] / ms[1]:4.2f})" for width in WIDTHS)
            print(f"{context:7d}  " + "".join(cells), flush=True)
            results[context] = ms
    report({"t_ms": results}, arguments.json)


if __name__ == "__main__":
    main()
