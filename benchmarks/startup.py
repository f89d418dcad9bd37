"""Start-up time and memory of a model.

    python benchmarks/startup.py                # the demo
    python benchmarks/startup.py coder-1.5b     # or any MODEL

Prints the time of `edge-spec --help`, the time of a second start up to its first token, the peak
memory of a process that fills 2,048 tokens of context, and the peak memory of an export.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import real_models
from common import report

_MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"
_FILL = """
import sys
import edge_spec
with edge_spec.load(sys.argv[1], drafter="none") as llm:
    words = "The harbour was quiet when the first boats came back to the town. " * 200
    prompt = llm.parts.text.tokenizer.encode(words)[:1920]
    assert len(prompt) == 1920
    tokens = llm.generate(prompt, max_tokens=128).tokens
    assert len(tokens) == 128, len(tokens)
"""
# A process's children report their peak to it; one child a measurement keeps them apart.
_PEAK = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", _MAIN, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # errors are seen
    return time.perf_counter() - start


def peak_mb(*arguments: str) -> float:
    """Peak resident memory in MB of `python *arguments` (ru_maxrss is in KiB on Linux)."""
    command = [sys.executable, "-c", _PEAK, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = real_models.named(arguments.model)
    first_token = ("generate", model, "Hi", "--max-tokens", "1")
    seconds(*first_token)  # the first use converts the model
    repeat = range(arguments.repetitions)
    results = {
        "help_s": median(seconds("--help") for _ in repeat),
        "second_start_s": median(seconds(*first_token) for _ in repeat),
        "peak_mb_at_2048_tokens": peak_mb("-c", _FILL, model),
    }
    with tempfile.TemporaryDirectory() as out:
        results["export_peak_mb"] = peak_mb("-c", _MAIN, "export", model, f"{out}/bundle")
    print(json.dumps(results, indent=2))
    report(results, arguments.json)


if __name__ == "__main__":
    main()
