"""The larger T5 of train_t5.py with layers and columns that change nothing but its time.

    python benchmarks/stretched_t5.py OUT NEW [--times 4] [--inner 2048]

writes NEW/large, NEW/small and NEW/prompts.jsonl as train_t5.py does. Each layer of the larger
model is followed by copies whose last matrices are zero, so that they add exactly nothing, and
every MLP is widened by columns that are multiplied by zeros. Texts and acceptance are those of OUT;
a step of the target takes as long as that of a model of such a size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

_BLOCK = re.compile(r"(encoder|decoder)\.block\.(\d+)\.(.+)")
_LAST = ("SelfAttention.o.weight", "EncDecAttention.o.weight", "DenseReluDense.wo.weight")


def widened(tensors: dict[str, np.ndarray], inner: int) -> dict[str, np.ndarray]:
    """With MLPs of `inner` columns, of which those that were not there have no say."""
    draw, found = np.random.default_rng(0), {}
    for name, values in tensors.items():
        part = name.rsplit(".", 2)[-2]
        if part in ("wi", "wi_0", "wi_1"):
            more = draw.standard_normal((inner - len(values), values.shape[1]))
            values = np.concatenate([values, 0.05 * more.astype(np.float32)])
        elif part == "wo":
            none = np.zeros((len(values), inner - values.shape[1]), np.float32)
            values = np.concatenate([values, none], axis=1)
        found[name] = values
    return found


def deepened(tensors: dict[str, np.ndarray], times: int) -> dict[str, np.ndarray]:
    """With times - 1 copies after each layer. Rows of a copy are turned by a number of its own:
    equal matrices would be kept once."""
    found = {}
    for name, values in tensors.items():
        block = _BLOCK.fullmatch(name)
        if block is None:
            found[name] = values
            continue
        half, number, part = block.groups()
        for copy in range(times):
            own = values if copy == 0 else np.roll(values, copy, axis=0)
            if copy and part.endswith(_LAST):
                own = np.zeros_like(values)
            if copy and "relative_attention_bias" in part:
                continue
            found[f"{half}.block.{int(number) * times + copy}.{part}"] = np.ascontiguousarray(own)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--inner", type=int, default=2048)
    asked = parser.parse_args()
    shutil.copytree(asked.out, asked.new)
    large = asked.new / "large"
    tensors = load_file(large / "model.safetensors")
    grown = deepened(widened(tensors, asked.inner), asked.times)
    save_file(grown, large / "model.safetensors", {"format": "pt"})
    path = large / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("num_layers", "num_decoder_layers"):
        config[key] *= asked.times
    config["d_ff"] = asked.inner
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    size = sum(each.size for each in grown.values())
    print(f"{large}: {size / 1e6:.1f} million parameters, {config['num_decoder_layers']} layers")


if __name__ == "__main__":
    sys.exit(main())
