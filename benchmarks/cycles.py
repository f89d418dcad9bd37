"""Open, generate, close, again and again: does memory or a file handle stay behind?

    python benchmarks/cycles.py MODEL [--runtime llamacpp] [--cycles 1000]

Give a tiny model. Resident memory is compared between the first tenth of the cycles, in which
libraries and allocators fill their pools, and the last tenth.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

from common import open_engine, report


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runtime", default="llamacpp")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    resident, handles = [], []
    started = time.perf_counter()
    for _ in range(arguments.cycles):
        with open_engine(arguments.model, runtime=arguments.runtime) as engine:
            engine.generate([1, 2, 3, 1, 2], max_tokens=16)
        resident.append(resident_bytes())
        handles.append(len(list(Path("/proc/self/fd").iterdir())))
    tenth = max(1, arguments.cycles // 10)
    first, last = median(resident[:tenth]), median(resident[-tenth:])
    took_s = time.perf_counter() - started
    print(
        f"{arguments.cycles} cycles on {arguments.runtime} in {took_s:.0f} s: "
        f"{first / 1e6:.1f} -> {last / 1e6:.1f} MB resident ({last / first - 1:+.2%}), "
        f"{handles[tenth - 1]} -> {handles[-1]} open files"
    )
    results = {
        "first_bytes": first,
        "last_bytes": last,
        "handles": handles[-1] - handles[tenth - 1],
    }
    report(results, arguments.json)


if __name__ == "__main__":
    main()
