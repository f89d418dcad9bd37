"""The T5s of train_t5.py in the shapes of Flan-T5s, with weights that change nothing but time.

    python benchmarks/stretched_t5.py OUT NEW [--large large] [--small small]

writes NEW/large, NEW/small and NEW/prompts.jsonl as train_t5.py does. Each model gets the width,
MLPs, heads, layers and vocabulary of a published one (Chung et al. 2022, Flan-T5), so that a step
takes as long. What is added computes nothing: hidden numbers beyond the model's own are zero, and
further heads, columns and layers multiply by what they read of those. All matrices are as dense,
and no two equal. Texts and acceptance are those of OUT, up to the rounding of another division.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# Heads are of 32 numbers, as the trained ones are, and twice as many as published.
SHAPES: dict[str, dict[str, int]] = {
    "small": {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 12},
    "base": {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 24},
    "large": {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 32},
}
VOCABULARY = 32128
# Of what is added: small, since what a kernel rounds must not grow from layer to layer there.
_NOISE = 0.002
_UNLIKELY = 2.0  # times the embedding of a token that is never written
_BLOCK = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.\d\.(.+)\.weight")
# What an attention or MLP multiplies all else by: where it reads nothing, nothing is added.
_FACTORS = ("SelfAttention.v", "EncDecAttention.v", "DenseReluDense.wi_1")
_LAST = ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")


class Stretch:
    """From a model's configuration to one of these widths, which it is given."""

    def __init__(self, config: dict[str, Any], shape: dict[str, int]) -> None:
        self.hidden, self.new_hidden = config["d_model"], shape["d_model"]
        self.shape = shape
        self.times = shape["num_layers"] // config["num_layers"]
        self._draw = np.random.default_rng(0)

    def _noise(self, rows: int, columns: int) -> np.ndarray:
        found: np.ndarray = self._draw.standard_normal((rows, columns), np.float32)
        return _NOISE * found

    def inner(self, part: str) -> int:
        """Returns the other width of a matrix: of heads or of an MLP."""
        return self.shape["d_ff"] if "Dense" in part else 32 * self.shape["num_heads"]

    def reading(self, part: str, values: np.ndarray | None) -> np.ndarray:
        """A matrix that reads the hidden numbers; values: None in a layer that is added."""
        found = self._noise(self.inner(part), self.new_hidden)
        if part in _FACTORS:
            found[:, : self.hidden] = 0  # of the rows that are added
        if values is not None:
            found[: len(values), : self.hidden] = values
        return found

    def writing(self, part: str, values: np.ndarray | None) -> np.ndarray:
        """A matrix that adds to the hidden numbers. Columns that are added are multiplied by 0."""
        found = self._noise(self.new_hidden, self.inner(part))
        if values is not None:
            found[:, : values.shape[1]] = 0
            found[: self.hidden, : values.shape[1]] = values
        return found

    def norm(self, values: np.ndarray, is_final: bool) -> np.ndarray:
        """Its mean is over more numbers; scores are divided by the root of their count."""
        found = np.ones(self.new_hidden, np.float32)
        scale = 1.0 if is_final else (self.hidden / self.new_hidden) ** 0.5
        found[: self.hidden] = scale * values
        return found

    def embedding(self, values: np.ndarray) -> np.ndarray:
        found = np.zeros((VOCABULARY, self.new_hidden), np.float32)
        found[: len(values), : self.hidden] = values
        found[len(values) :, : self.hidden] = _UNLIKELY * values[-8:].mean(axis=0)
        return found


def stretched(tensors: dict[str, np.ndarray], stretch: Stretch) -> dict[str, np.ndarray]:
    """Returns the larger model's tensors, in float16."""
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        block = _BLOCK.fullmatch(name)
        if name == "shared.weight":
            found[name] = stretch.embedding(values)
        elif block is None:
            if name.endswith("final_layer_norm.weight"):
                found[name] = stretch.norm(values, name.startswith("decoder"))
        else:
            half, number, part = block.groups()
            for copy in range(stretch.times):
                grown = _of_layer(part, values, copy, stretch)
                if grown is not None:
                    layer = int(number) * stretch.times + copy
                    new = name.replace(f"{half}.block.{number}.", f"{half}.block.{layer}.", 1)
                    found[new] = grown.astype(np.float16)
    return {name: each.astype(np.float16, copy=False) for name, each in found.items()}


def _of_layer(part: str, values: np.ndarray, copy: int, stretch: Stretch) -> np.ndarray | None:
    """Of the layer itself or of one that is added after it, which has no table of positions."""
    if part == "layer_norm":
        return stretch.norm(values, is_final=False)
    if part.endswith("relative_attention_bias"):
        if copy:
            return None
        more = np.zeros((len(values), stretch.shape["num_heads"] - values.shape[1]), np.float32)
        return np.concatenate([values, more], axis=1)
    own = None if copy else values
    return stretch.writing(part, own) if part in _LAST else stretch.reading(part, own)


def write(directory: Path, shape: dict[str, int]) -> None:
    """Stretches the model there."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    stretch = Stretch(config, shape)
    grown = stretched(load_file(directory / "model.safetensors"), stretch)
    save_file(grown, directory / "model.safetensors", {"format": "pt"})
    config |= {**shape, "num_decoder_layers": shape["num_layers"], "vocab_size": VOCABULARY}
    config["layer_norm_epsilon"] *= stretch.hidden / stretch.new_hidden
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    size = sum(each.size for each in grown.values())
    print(f"{directory}: {size / 1e6:.1f} million parameters, {shape['num_layers']} layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--large", choices=SHAPES, default="large", help="shape of the target")
    parser.add_argument("--small", choices=SHAPES, default="small", help="shape of the draft")
    asked = parser.parse_args()
    shutil.copytree(asked.out, asked.new)
    for name in ("large", "small"):
        write(asked.new / name, SHAPES[vars(asked)[name]])


if __name__ == "__main__":
    sys.exit(main())
