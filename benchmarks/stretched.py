"""Pairs from one small model: a target that costs several times as much, and a draft with less.

    python benchmarks/stretched.py                      # makes them all and says how large they are
    python benchmarks/stretched.py --times 4 --targets onnx:int8 --drafts onnx:3

A target is the demo model with identity blocks: its own blocks with their rows turned and their
last projections zero, so that they add exactly nothing. It writes what the demo model writes and
takes the time of a deeper one; embedding and head are there once. A draft is the demo model itself
in 4, 3 or 2 bits. No runtime here has kernels for 2 or 3 bits of 576 columns, so those are stored
in 4: they are accepted as often as 2 or 3 bits are, and cost what 4 bits cost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from edge_spec.core.export import ExportOptions
from edge_spec.distill.tensor_file import read_tensors, write_tensors
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle
from edge_spec.models.demo import SHA256, fetch_demo_model
from edge_spec.models.source import EXPORT_VERSION
from edge_spec.storage.atomic import cache_directory

VERSION = 1  # of what this script writes
BLOCK = 32  # weights that share a scale in Q4_0 and Q8_0
Q8_0_BYTES = 34  # of a block
FOUR_BITS = {"onnx": "int4", "gguf": "Q4_0"}
TARGETS = ("onnx:int8", "onnx:fp16", "gguf:Q8_0", "gguf:F16")
DRAFTS = tuple(f"{format}:{bits}" for format in FOUR_BITS for bits in (4, 3, 2))
# Shares of a block's range that a grid may span: few levels are better spent on the many weights
# in the middle.
_RANGE_CUTS = np.arange(1.0, 0.45, -0.06, dtype=np.float32)


def make_target(times: int, format: str, quantization: str, at_end: bool = False) -> Path:
    """A bundle directory or GGUF file, kept in the cache. Raises UsageError, ExportError.

    times: how many blocks there are for each one of the demo model; 1: the demo model.
    quantization: one of TARGETS; int4 would not store exact zeros (see `_zero`).
    at_end: all identity blocks after all others, rather than each after the one it copies.
    """
    kind = f"{times}x-{quantization}" + ("-end" if at_end else "")
    checkpoint = open_checkpoint(_demo_model())
    return _export(stretched(checkpoint, times, at_end), format, quantization, kind)


def make_draft(bits: int, format: str) -> Path:
    """The demo model with matrices of so many bits, stored as 4; embedding and head keep 8."""
    checkpoint = open_checkpoint(_demo_model())
    if bits != 4:
        checkpoint = rounded(checkpoint, bits)
    return _export(checkpoint, format, FOUR_BITS[format], f"draft-{bits}bit")


def stretch_head(head: Path, out: Path, times: int) -> Path:
    """Writes an EAGLE-3 head of the demo model for a target that is so many times as deep, and
    returns `out`: the streams that it reads enter the same blocks there. The embedding, which a
    bundle keeps in another form, goes with it."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    demo = open_checkpoint(_demo_model())
    depth = demo.config.num_layers
    config["eagle_aux_hidden_state_layer_ids"] = [
        times * layer for layer in (2, depth // 2, depth - 3)
    ]
    tensors, _ = read_tensors(head / "model.safetensors")
    embedding = demo.float32("model.embed_tokens.weight").astype(np.float16)
    out.mkdir(parents=True)
    write_tensors(out / "model.safetensors", {**tensors, "embed_tokens.weight": embedding})
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def stretched(checkpoint: StoredCheckpoint, times: int, at_end: bool = False) -> StoredCheckpoint:
    """The checkpoint with times - 1 identity blocks for each block.

    The matrices of an identity block are those of the block it copies with the rows turned by a
    number of its own: onnxruntime keeps equal matrices once, and they would come from the
    processor's cache. Those that write into the residual are zero.
    """
    config = checkpoint.config
    num_layers = config.num_layers
    zeros: dict[tuple[int, ...], StoredTensor] = {}
    tensors = {n: t for n, t in checkpoint.tensors.items() if not n.startswith("model.layers.")}
    for name, tensor in checkpoint.tensors.items():
        if not name.startswith("model.layers."):
            continue
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        layer = int(number)
        source = tensor
        if rest.startswith(("self_attn.o_proj.", "mlp.down_proj.")):
            source = zeros.setdefault(tensor.shape, _zero(tensor.shape))
        for copy in range(times):
            at = layer + copy * num_layers if at_end else layer * times + copy
            tensors[f"model.layers.{at}.{rest}"] = (
                _turned(source, layer * times + copy) if copy else tensor
            )
    return replace(
        checkpoint, config=replace(config, num_layers=num_layers * times), tensors=tensors
    )


def _turned(tensor: StoredTensor, by: int) -> StoredTensor:
    """The same rows in another order; vectors as they are."""
    if len(tensor.shape) == 1:
        return tensor
    order = np.arange(tensor.shape[0]) if tensor.row_order is None else tensor.row_order
    return replace(tensor, row_order=np.roll(order, by))


def _zero(shape: tuple[int, ...]) -> StoredTensor:
    """Zeros that differ in their bytes: as Q8_0, numbers with the scale 0; as floats, 0 and -0.

    Quantized from floats, int8 would have the scale 1 there, and a kernel that subtracts the zero
    point's share from the sum afterwards would leave rounding errors.
    """
    if len(shape) == 1 or shape[-1] % BLOCK:
        return StoredTensor(shape, Kind.F32, np.zeros(shape, np.float32))
    blocks = shape[-1] // BLOCK
    random = np.random.default_rng(0)
    stored = random.integers(0, 256, (shape[0], blocks, Q8_0_BYTES)).astype(np.uint8)
    stored[..., :2] = 0  # the scale
    return StoredTensor(shape, Kind.Q8_0, stored.reshape(shape[0], -1))


def rounded(checkpoint: StoredCheckpoint, bits: int) -> StoredCheckpoint:
    """The checkpoint with the matrices of its layers on grids of 2 ** bits levels, as Q4_0.

    bits: 2 or 3. Raises ValueError for others and where rows are no whole number of blocks.
    """
    if bits not in (2, 3):
        raise ValueError(f"{bits} bits; Q4_0 holds any grid of 2 or 3")
    tensors = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("model.layers.") and len(tensor.shape) == 2:
            stored = to_q4_0(tensor.float32(), bits)
            tensors[name] = StoredTensor(tensor.shape, Kind.Q4_0, stored)
    return replace(checkpoint, tensors=tensors)


def to_q4_0(weights: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [rows, columns / 32 * 18]: each block at the best grid found in squared error.

    A weight is s * (q - z), q and z integers of `bits` bits and s a float16: q - z lies within -7
    and 7, so that Q4_0, whose levels are -8 to 7, holds it exactly. weights: [rows, columns].
    """
    rows, columns = weights.shape
    if columns % BLOCK:
        raise ValueError(f"rows of {columns} weights are no whole number of blocks of {BLOCK}")
    blocks = weights.reshape(-1, BLOCK)
    low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
    top = np.float32((1 << bits) - 1)
    scales, levels = np.zeros_like(low), np.zeros(blocks.shape, np.float32)
    errors = np.full(low.shape, np.inf, np.float32)
    for cut in _RANGE_CUTS:
        step = np.where(high > low, (high - low) * cut / top, 1)
        middle = np.rint(top / 2 - (low + high) / 2 / step)
        for zero in (middle - 1, middle, middle + 1):
            fitted, scale, error = _fit(blocks, step, np.clip(zero, 0, top), top)
            better = error < errors
            for best, new in ((levels, fitted), (scales, scale), (errors, error)):
                best[better] = new[better]
    nibbles = (levels + 8).astype(np.uint8)
    half = BLOCK // 2
    packed = nibbles[:, :half] | nibbles[:, half:] << 4
    stored = np.concatenate([scales.astype(np.float16)[:, None].view(np.uint8), packed], axis=1)
    return stored.reshape(rows, -1)


def _fit(
    blocks: np.ndarray, step: np.ndarray, zero: np.ndarray, top: np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels q - z on a grid, the least-squares scale for them as float16 has it, and the squared
    error of each block."""
    levels = np.clip(np.rint(blocks / step[:, None]), -zero[:, None], (top - zero)[:, None])
    norm = np.einsum("ij,ij->i", levels, levels)
    dot = np.einsum("ij,ij->i", blocks, levels)
    scale = (dot / np.maximum(norm, 1)).astype(np.float16).astype(np.float32)
    difference = levels * scale[:, None] - blocks
    return levels, scale, np.einsum("ij,ij->i", difference, difference)


def _demo_model() -> Path:
    return fetch_demo_model(_say)


def _export(checkpoint: StoredCheckpoint, format: str, quantization: str, kind: str) -> Path:
    """Not compared with the reference, which would take minutes."""
    key = repr((SHA256, kind, format, quantization, EXPORT_VERSION, VERSION))
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    out = cache_directory() / "benchmarks" / f"smollm2-{kind}-{digest}"
    if format == "gguf":
        out = out.with_name(out.name + ".gguf")
    if not (out.is_file() or is_bundle(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
        options = ExportOptions(quantization, check=False)
        exporter: Any = runtimes.load_exporter(format)
        exporter.export(checkpoint, out, options, _say)
    return out


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def _say(what: str, fraction: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {fraction:4.0%}", end="\n" if fraction == 1 else "", file=sys.stderr)


def _split(names: Iterable[str]) -> list[list[str]]:
    return [name.split(":") for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--targets", nargs="*", default=TARGETS, help="FORMAT:QUANTIZATION")
    parser.add_argument("--drafts", nargs="*", default=DRAFTS, help="FORMAT:BITS")
    parser.add_argument("--at-end", action="store_true")
    arguments = parser.parse_args()

    def show(what: str, path: Path, taken_s: float) -> None:
        print(f"{what:22s} {_size(path) / 1e6:8.0f} MB {taken_s:7.1f} s  {path}", flush=True)

    for format, bits in _split(arguments.drafts):
        start = time.perf_counter()
        path = make_draft(int(bits), format)
        show(f"draft {format} {bits} bits", path, time.perf_counter() - start)
    for times in arguments.times:
        for format, quantization in _split(arguments.targets):
            start = time.perf_counter()
            path = make_target(times, format, quantization, arguments.at_end)
            show(f"target {times}x {quantization}", path, time.perf_counter() - start)


if __name__ == "__main__":
    main()
