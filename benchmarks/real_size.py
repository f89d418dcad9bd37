"""From import to the first token with models of real shapes, beside llama-cpp-python.

    python benchmarks/real_size.py --sizes 1B --runtimes llamacpp,ik,llama-cpp-python --starts 3

The models are stand-ins: random Q4_0 weights in the shapes of Llama 3.2 with the demo model's
vocabulary. They take the time and the memory of real ones and say nothing. They are written into
the cache once. The first start of all finds out what later ones know; ort's converts, too. Each
start is a process of its own; times are seconds, memory is the peak of what is resident.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import report
from gguf.constants import GGMLQuantizationType as Kind

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.models import runtimes
from edge_spec.models.demo import fetch_demo_model
from edge_spec.storage.atomic import cache_directory

PEER = "llama-cpp-python"
SHAPES = {
    "1B": {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "head_dim": 64},
    "3B": {"num_layers": 28, "hidden_size": 3072, "num_heads": 24, "head_dim": 128},
    "8B": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "head_dim": 128},
}
_INTERMEDIATE = {"8B": 14336}
_SCALE = np.float16(0.002)  # small enough for all scores to be numbers
_BLOCK, _BLOCK_BYTES = 32, 18
# What one start does, given the file, the runtime and the number of tokens of the prompt.
_START = """
import json, resource, sys, time
started = time.perf_counter()
path, runtime, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if runtime == "llama-cpp-python":
    import llama_cpp
    model = llama_cpp.Llama(path, n_ctx=1024, verbose=False, n_threads=THREADS)
    loaded = time.perf_counter()
    next(model.generate(list(range(100, 100 + count)), temp=0))
else:
    import edge_spec
    options = dict(context_length=1024, threads=THREADS)
    model = edge_spec.load(path, runtime=runtime, **options)
    loaded = time.perf_counter()
    model.generate(list(range(100, 100 + count)), max_tokens=1)
ended = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"first_token": ended - started, "load": loaded - started, "peak": peak}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1B")
    parser.add_argument("--runtimes", default=f"llamacpp,ort,{PEER}")
    parser.add_argument("--starts", type=int, default=3, help="after the first one")
    parser.add_argument("--tokens", type=int, default=128, help="of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    print("| model | runtime | first start | to the first token | load | peak |")
    print("|---|---|---|---|---|---|")
    for size in arguments.sizes.split(","):
        path = stand_in(size)
        starts: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.starts + 1):
            for runtime in arguments.runtimes.split(","):
                made = start(path, runtime, arguments.tokens, arguments.threads)
                starts.setdefault(runtime, []).append(made)
        for runtime, made in starts.items():
            print(line(size, runtime, made), flush=True)
        found[size] = {"bytes": path.stat().st_size, "starts": starts}
    report(found, arguments.json)


def line(size: str, runtime: str, starts: list[dict[str, float]]) -> str:
    first, *others = starts
    of = {name: median(each[name] for each in others or [first]) for name in first}
    return (
        f"| {size} | {runtime} | {first['first_token']:.1f} | {of['first_token']:.1f} | "
        f"{of['load']:.1f} | {of['peak'] / 1e9:.2f} GB |"
    )


def start(path: Path, runtime: str, num_tokens: int, threads: int) -> dict[str, float]:
    code = _START.replace("THREADS", str(threads))
    command = [sys.executable, "-c", code, str(path), runtime, str(num_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    made: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return made


def stand_in(size: str) -> Path:
    """A GGUF file of random weights, kept in the cache."""
    path = cache_directory() / "benchmarks" / f"stand-in-{size}.gguf"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    demo = open_checkpoint(fetch_demo_model(_quiet))
    intermediate = _INTERMEDIATE.get(size, 8192)
    config = replace(demo.config, num_kv_heads=8, intermediate_size=intermediate, **SHAPES[size])
    checkpoint = replace(demo, config=config, tensors=dict(_tensors(demo, config)))
    exporter: Any = runtimes.load_exporter("gguf")
    exporter.export(checkpoint, path, ExportOptions("Q4_0", check=False), _quiet)
    return path


def _tensors(demo: StoredCheckpoint, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    """Those of a layer of the demo model, in this shape, for each layer; then the others."""
    rng = np.random.default_rng(0)
    hidden, mlp = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (config.query_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.query_size),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    ones = StoredTensor((hidden,), Kind.F32, np.ones(hidden, np.float32).view(np.uint8))
    for layer in range(config.num_layers):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", _random(shape, rng)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", ones
    yield "model.embed_tokens.weight", _random((config.vocab_size, hidden), rng)
    yield "model.norm.weight", ones


def _random(shape: tuple[int, int], rng: np.random.Generator) -> StoredTensor:
    rows, columns = shape
    stored = rng.integers(0, 256, (rows, columns // _BLOCK, _BLOCK_BYTES), np.uint8)
    stored[..., :2] = np.frombuffer(_SCALE.tobytes(), np.uint8)
    return StoredTensor(shape, Kind.Q4_0, stored.reshape(rows, -1))


def _quiet(what: str, fraction: float) -> None: ...


if __name__ == "__main__":
    main()
