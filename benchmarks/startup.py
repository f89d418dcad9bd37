"""Start-up time and memory of a model, beside llama-cpp-python where the model is a GGUF file.

    python benchmarks/startup.py                # the demo
    python benchmarks/startup.py coder-1.5b     # or any MODEL
    python benchmarks/startup.py --shape 7B     # random weights

Whole processes, in turns: from their start to their first text, with an empty cache ("first") and
with one ("later"), medians over --rounds. Peak memory is that of a process that fills 2,048 tokens
of context, and with --export that of an export.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import real_models
from common import report
from random_gguf import SHAPES, write_random

_MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"
_PROMPT = "Write a Python function that adds two numbers."
_PEER = """
import sys
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=4096, n_threads=int(sys.argv[3]), verbose=False)
options = {"max_tokens": 16, "temperature": 0, "stream": True}
if llm.metadata.get("tokenizer.chat_template"):
    message = {"role": "user", "content": sys.argv[2]}
    chunks = llm.create_chat_completion([message], **options)
    texts = (each["choices"][0]["delta"].get("content") for each in chunks)
else:
    texts = (each["choices"][0]["text"] for each in llm.create_completion(sys.argv[2], **options))
for text in filter(None, texts):
    print(text, end="", flush=True)
"""
# As a package that pip has installed: compiled (one that is not takes a quarter of a second more).
_PYTHON = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "edge-spec-startup"),
}
_WORDS = "The harbour was quiet when the first boats came back to the town. "
_FILL = f"""
import sys
import edge_spec
with edge_spec.load(sys.argv[1], drafter="none") as llm:
    prompt = llm.parts.text.tokenizer.encode({_WORDS!r} * 400)[:1920]
    assert len(prompt) == 1920
    llm.generate(prompt, max_tokens=128)
"""
_FILL_PEER = f"""
import sys
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_threads=int(sys.argv[2]), verbose=False)
prompt = llm.tokenize(({_WORDS!r} * 400).encode())[:1920]
llm.eval(prompt)
for token in prompt[:127]:
    llm.eval([token])
"""
# A process's children report their peak to it; one child a measurement keeps them apart.
_PEAK = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def first_text_s(arguments: list[str], cache: Path) -> float:
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"EDGE_SPEC_CACHE": str(cache)} | _PYTHON,
    )
    assert process.stdout is not None
    found = process.stdout.read(1)
    elapsed_s = time.perf_counter() - start
    process.stdout.read()
    if process.wait() or not found:
        raise SystemExit(f"{arguments[:4]} ended with {process.returncode} and no text")
    return elapsed_s


def peak_mb(*arguments: str) -> float:
    """Returns the peak resident memory in MB of `python *arguments` (ru_maxrss is in KiB)."""
    command = [sys.executable, "-c", _PEAK, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout) * 1024 / 1e6


def starts_s(model: str, peer: list[str] | None, rounds: int) -> dict[str, float]:
    """Returns the medians by name."""
    ours = ["-c", _MAIN, "generate", model, _PROMPT, "--max-tokens", "16"]
    times: dict[str, list[float]] = {"help": [], "first": [], "later": [], "llama-cpp-python": []}
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        for _ in range(rounds):
            if peer is not None:
                times["llama-cpp-python"].append(first_text_s(peer, cache))
            times["help"].append(first_text_s(["-c", _MAIN, "--help"], cache))
            for name in ("first", "later"):
                if name == "first":
                    _empty(cache, keep="models")  # downloads are no part of a start
                times[name].append(first_text_s(ours, cache))
    return {f"{name}_s": median(found) for name, found in times.items() if found}


def _empty(cache: Path, keep: str) -> None:
    for entry in cache.iterdir() if cache.is_dir() else ():
        if entry.name != keep:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in place of a model")
    parser.add_argument("--type", default="Q4_K", help="of random weights")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--export", action="store_true", help="measure an export's memory, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    with ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        model = real_models.named(arguments.model)
        if arguments.shape:
            path = Path(out) / f"{arguments.shape}.gguf"
            write_random(path, SHAPES[arguments.shape], arguments.type)
            model = str(path)
        threads = str(len(os.sched_getaffinity(0)))
        is_file = model.endswith(".gguf")
        peer = ["-c", _PEER, model, _PROMPT, threads] if is_file else None
        results = starts_s(model, peer, arguments.rounds)
        results["peak_mb_at_2048_tokens"] = peak_mb("-c", _FILL, model)
        if is_file:
            results["llama_cpp_python_peak_mb"] = peak_mb("-c", _FILL_PEER, model, threads)
        if arguments.export:
            results["export_peak_mb"] = peak_mb("-c", _MAIN, "export", model, f"{out}/bundle")
    print(json.dumps(results, indent=2))
    report(results, arguments.json)


if __name__ == "__main__":
    main()
