"""Quantize matrices to blocks of integers, in the layout of onnxruntime's MatMulNBits.

A block of BLOCK_SIZE neighbouring weights of one row shares a float32 scale s and an integer zero
point z, 2 ** (bits - 1) by default; a weight is s * (q - z). (Float zero points would carry Q4_1
over exactly, but make the CPU kernel 160 times slower.)

The cost of a weight's error is the mean square of its inputs (Lin et al. 2024, AWQ; Kim et al.
2024, SqueezeLLM, weigh by the gradient).

Matrices that a file stores in this form are carried over, and 8 bits are rounded: they lose 0.003
nats a token on the demo model. Other matrices are fitted to their inputs after the quantization of
all before them. Two streams of our own prompts pass the layers, one with the model's weights, one
with the quantized ones. For inputs X instead of E, the weights nearest to the source's outputs
E W^T are W E^T X (X^T X)^-1 (least squares; as Frantar et al. 2022, GPTQ, and Li et al. 2025,
GPTAQ). Since X is a sample of few texts, part of the way is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import LayerStream
from edge_spec.core.model import Progress
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.requests import BLOCK_SIZE
from edge_spec.exporters.stored_tensor import StoredTensor, on_all_cores
from edge_spec.models import runtimes
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts
from edge_spec.text.tokenizer import Tokenizer

# Of the weights that are worked on at once by one thread: about ten times 16 MB of temporaries.
_SLICE_WEIGHTS = 1 << 22


@dataclass(frozen=True, eq=False)
class BlockQuantized:
    """A weight matrix [rows, columns] in blocks along the columns, the last one padded."""

    bits: int  # 4 or 8
    columns: int
    packed: np.ndarray  # uint8 [rows, blocks, BLOCK_SIZE * bits / 8], low nibble first
    scales: np.ndarray  # float32 [rows, blocks]
    zeros: np.ndarray  # uint8 [rows, blocks]

    @classmethod
    def symmetric(
        cls, bits: int, columns: int, packed: np.ndarray, scales: np.ndarray
    ) -> BlockQuantized:
        return cls(bits, columns, packed, scales, np.full(scales.shape, 1 << (bits - 1), np.uint8))

    @property
    def zero_points(self) -> np.ndarray | None:
        """uint8 [rows, ceil(blocks * bits / 8)]; None where all are in the middle."""
        return None if (self.zeros == 1 << (self.bits - 1)).all() else self.stated_zero_points()

    def stated_zero_points(self) -> np.ndarray:
        return _pack(self.zeros, self.bits)

    def flat(self) -> np.ndarray:
        """The packed values, uint8 [rows, bytes]."""
        return self.packed.reshape(len(self.packed), -1)

    def rows(self, rows: slice | np.ndarray) -> BlockQuantized:
        packed, scales, zeros = self.packed[rows], self.scales[rows], self.zeros[rows]
        return replace(self, packed=packed, scales=scales, zeros=zeros)

    def levels(self) -> np.ndarray:
        """The integers, uint8 [rows, blocks * BLOCK_SIZE]."""
        return _unpack(self.packed, self.bits).reshape(len(self.packed), -1)

    def dequantize(self) -> np.ndarray:
        """float32 [rows, columns]."""
        values = self.levels().reshape(*self.scales.shape, BLOCK_SIZE)
        zeros = self.zeros[..., None].astype(np.float32)
        floats: np.ndarray = (values - zeros) * self.scales[..., None]
        return floats.astype(np.float32).reshape(len(floats), -1)[:, : self.columns]


def from_q4_0(stored: np.ndarray, columns: int) -> BlockQuantized:
    """Convert GGUF Q4_0 rows exactly. stored: uint8 [rows, blocks * 18]; a block is a float16 scale
    and 16 bytes, of which byte i holds weight i below and i + 16 above."""
    blocks = np.ascontiguousarray(stored).view("<u2").reshape(len(stored), -1, 9)
    pairs = blocks[..., 1:]  # two bytes at a time: weights i, i + 16, i + 1 and i + 17
    packed = np.empty((*blocks.shape[:2], 16), np.uint8)
    packed[..., :8] = (pairs & 15) | (pairs >> 4 & 0xF0)
    packed[..., 8:] = (pairs >> 4 & 15) | (pairs >> 8 & 0xF0)
    scales = blocks[..., 0].view("<f2").astype(np.float32)
    return BlockQuantized.symmetric(4, columns, packed, scales)


def from_q8_0(stored: np.ndarray, columns: int) -> BlockQuantized:
    """Carries GGUF Q8_0 rows over bit for bit. stored: uint8 [rows, blocks * 34]."""
    blocks = stored.reshape(len(stored), -1, 34)
    values = blocks[..., 2:] ^ 0x80  # two's complement to an offset of 128
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)
    return BlockQuantized.symmetric(8, columns, values, scales)


def is_carried(stored: Sequence[StoredTensor], bits: int) -> bool:
    """Returns whether their file has them in this form."""
    kind = {4: GGMLQuantizationType.Q4_0, 8: GGMLQuantizationType.Q8_0}[bits]
    return all(tensor.kind == kind for tensor in stored)


def quantize_stored(
    stored: Sequence[StoredTensor],
    bits: int,
    correction: np.ndarray | None = None,
    symmetric: bool = False,
) -> BlockQuantized:
    """Quantize tensors of the same columns, stacked by rows, slice by slice on all cores. Blocks of
    this form are kept bit for bit; others are first multiplied by `correction` [columns, columns].
    """
    columns = stored[0].shape[1]
    carry = None
    if is_carried(stored, bits):
        carry = from_q4_0 if bits == 4 else from_q8_0

    def made(part: StoredTensor) -> BlockQuantized:
        if carry is not None:
            return carry(part.stored_rows(), columns)
        weights = part.float32()
        if correction is not None:
            weights = weights @ correction
        return _quantized(weights, bits, symmetric, part.importance)

    step = max(1, _SLICE_WEIGHTS // columns)
    parts = [
        tensor.rows(slice(start, start + step))
        for tensor in stored
        for start in range(0, tensor.shape[0], step)
    ]
    return joined(on_all_cores(made, parts))


def quantize(
    weights: np.ndarray,
    bits: int,
    *,
    symmetric: bool = False,
    importance: np.ndarray | None = None,
) -> BlockQuantized:
    """Return the blocks found nearest to `weights` [rows, columns] in squared error, weighted by
    `importance` [columns]. A block has a zero point only if it lowers the error, and never if
    `symmetric`."""
    tensor = replace(StoredTensor.of(weights), importance=importance)
    return quantize_stored([tensor], bits, symmetric=symmetric)


def _quantized(
    weights: np.ndarray, bits: int, symmetric: bool, importance: np.ndarray | None
) -> BlockQuantized:
    rows, columns = weights.shape
    blocks = -(-columns // BLOCK_SIZE)
    padding = ((0, 0), (0, blocks * BLOCK_SIZE - columns))
    counts = np.ones(columns) if importance is None else importance / importance.mean()
    counts = np.pad(counts, padding[1]).astype(np.float32).reshape(blocks, BLOCK_SIZE)
    padded = np.pad(weights, padding)
    levels, scales, zeros = _best_blocks(padded, counts, bits, symmetric)
    packed = _pack(levels.reshape(rows, blocks, BLOCK_SIZE), bits)
    scales, zeros = scales.reshape(rows, blocks), zeros.reshape(rows, blocks)
    return BlockQuantized(bits, columns, packed, scales, zeros)


def joined(parts: Sequence[BlockQuantized]) -> BlockQuantized:
    """Matrices of the same form above each other."""
    packed = np.concatenate([part.packed for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    zeros = np.concatenate([part.zeros for part in parts])
    return replace(parts[0], packed=packed, scales=scales, zeros=zeros)


def in_turns(parts: Sequence[BlockQuantized]) -> BlockQuantized:
    """Matrices of the same form and size, the first row of each before the second ones."""
    whole = joined(parts)
    return whole.rows(np.arange(len(whole.packed)).reshape(len(parts), -1).T.ravel())


def turns_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The same of floats."""
    turns: np.ndarray = np.stack(parts, axis=1).reshape(-1, parts[0].shape[-1])
    return turns


def _best_blocks(
    weights: np.ndarray, counts: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return levels uint8 [n, BLOCK_SIZE], scales float32 [n] and zero points uint8 [n] of n
    blocks. counts: [blocks of a row, BLOCK_SIZE] float32."""
    counts = np.tile(counts, (len(weights), 1))
    weights = weights.reshape(counts.shape)
    top, middle = np.float32((1 << bits) - 1), np.float32(1 << (bits - 1))
    low = np.minimum(weights.min(axis=1), 0)
    high = np.maximum(weights.max(axis=1), 0)
    # Symmetric first, so that a zero point has to earn its place: the extreme lies on -middle.
    extreme, centre = np.where(-low > high, low, high), np.full_like(low, middle)
    grids = [(extreme / -middle, centre)]
    for cut in _RANGE_CUTS[bits]:
        if symmetric:
            grids += [(extreme * np.float32(cut) / -middle, centre)]
            continue
        scale = np.where(high > low, (high - low) * np.float32(cut) / top, 1)
        grids.append((scale, np.clip(np.rint((top - (low + high) / scale) / 2), 0, top)))
    levels = np.empty(weights.shape, np.uint8)
    scales, zeros = np.empty_like(low), np.empty(low.shape, np.uint8)
    errors = np.full(low.shape, np.inf, np.float32)
    for scale, zero in grids:
        fitted, scale, error = _fit(weights, counts, np.where(scale == 0, 1, scale), zero, top)
        better = error < errors
        for best, new in ((levels, fitted), (scales, scale), (zeros, zero), (errors, error)):
            best[better] = new[better]
    return levels, scales, zeros


def _fit(
    weights: np.ndarray,
    counts: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    top: np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels on this grid, the least-squares scale for them, and the squared error [n]."""
    levels = weights / scale[:, None]
    np.rint(levels, out=levels)
    levels += zero[:, None]
    np.clip(levels, 0, top, out=levels)
    centred = levels - zero[:, None]
    norm = np.einsum("ij,ij,ij->i", centred, centred, counts)
    dot = np.einsum("ij,ij,ij->i", weights, centred, counts)
    scale = np.where(norm > 0, dot / np.where(norm > 0, norm, 1), scale).astype(np.float32)
    centred *= scale[:, None]
    centred -= weights
    return levels, scale, np.einsum("ij,ij,ij->i", centred, centred, counts)


# The whole range of a block, and at 4 bits also a little less of it: clipping the few extremes
# pays for a finer grid.
_RANGE_CUTS = {4: (1.0, 0.92, 0.84), 8: (1.0,)}


def _pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs the last axis, two 4-bit values a byte with the first one low."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    packed: np.ndarray = values[..., ::2] | values[..., 1::2] << 4
    return packed


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


_LARGEST_INT8 = 127


def channels(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns levels int8 [out, in] and scales float32 [out], symmetric."""
    largest = np.abs(weights).max(axis=1)
    scales = np.where(largest > 0, largest / np.float32(_LARGEST_INT8), np.float32(1))
    return np.rint(weights / scales[:, None]).astype(np.int8), scales.astype(np.float32)


_PROMPTS_PER_CATEGORY = 6
_MEASURED_PER_PROMPT = 32

_FLOOR = 1e-3  # of the mean: an input that was zero in these texts counts a little


def weigh_columns(checkpoint: StoredCheckpoint, progress: Progress) -> StoredCheckpoint:
    """Return the checkpoint with the importance of each matrix's columns, measured by the reference
    on our own prompts; an embedding that is no head has none."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json())
    tokens: list[int] = []
    for prompt in read_prompts(OWN_PROMPTS, _PROMPTS_PER_CATEGORY):
        tokens += tokenizer.encode(prompt.text + "\n")[:_MEASURED_PER_PROMPT]
    tensors = dict(checkpoint.tensors)

    def observe(name: str, inputs: np.ndarray) -> None:
        tensors[name] = replace(tensors[name], importance=importance(inputs))

    tokens = tokens[: checkpoint.config.context_length]
    stream = runtimes.load_layer_stream(checkpoint, [tokens], observe)
    num_layers = checkpoint.config.num_layers
    for layer in range(num_layers):
        stream.advance()
        progress("Measuring what weights are multiplied with", (layer + 1) / num_layers)
    stream.logits(np.arange(len(tokens)))
    return replace(checkpoint, tensors=tensors)


def importance(inputs: np.ndarray) -> np.ndarray:
    """Returns [in] float64, all alike where inputs are zero or no numbers; inputs: [rows, in]."""
    squares = np.square(inputs, dtype=np.float64).mean(axis=0)
    floored: np.ndarray = squares + _FLOOR * squares.mean()
    return floored if np.isfinite(floored).all() and floored.any() else np.ones(len(floored))


_TOKENS_PER_PROMPT = 128


def calibration_sequences(checkpoint: StoredCheckpoint, max_tokens: int) -> list[list[int]]:
    """Returns the beginnings of prompts of all categories, at most `max_tokens` in all and each
    within the model's context; none where the tokenizer makes nothing of them."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json())
    longest = min(_TOKENS_PER_PROMPT, checkpoint.config.context_length)
    by_category: dict[str, list[str]] = {}
    for prompt in read_prompts(OWN_PROMPTS):
        by_category.setdefault(prompt.category, []).append(prompt.text)
    found: list[list[int]] = []
    for texts in zip(*by_category.values(), strict=True):
        for text in texts:
            tokens = tokenizer.encode(text + "\n")[: min(longest, max_tokens)]
            max_tokens -= len(tokens)
            found += [tokens] if tokens else []
    return found


_DAMPING = 0.2  # of the mean square of the inputs
_PART = 0.5  # of the way: on the demo model the best of 0, a half and 1


def input_correction(inputs: np.ndarray, exact: np.ndarray) -> np.ndarray | None:
    """Return the matrix [columns, columns] float32 to multiply weights by; None for inputs that are
    zero or not finite. inputs, exact: [tokens, columns], with and without quantization before."""
    hessian = inputs.T @ inputs
    drift = exact.T @ inputs - hessian
    scale = np.float32(np.trace(hessian) / len(hessian))
    if not (np.isfinite(scale) and scale > 0 and np.isfinite(drift).all()):
        return None
    hessian /= scale
    drift /= scale
    diagonal = np.diag_indices_from(hessian)
    hessian[diagonal] += np.float32(_DAMPING)
    found: np.ndarray = np.linalg.solve(hessian, np.float32(_PART) * drift.T).T
    found[diagonal] += 1
    return found


# Which matrices of a layer share their inputs and are stored as one.
_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("conv.in_proj",),
    ("conv.out_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    ("per_layer_input_gate",),
    ("per_layer_projection",),
)
_OF_ALL_LAYERS = "model.per_layer_model_projection.weight"  # made before the first one, in 8 bits
# Parameters times tokens: a stream of so many passes the model in about ten seconds on two cores.
_MAX_WORK = 4e11
_MIN_TOKENS, _MAX_TOKENS = 128, 2048


class FittedLayers:
    """Reads a checkpoint as the weights that it has once they are in blocks."""

    def __init__(self, checkpoint: StoredCheckpoint, bits: int) -> None:
        self.config: ModelConfig = checkpoint.config
        self._checkpoint = checkpoint
        self._bits = bits
        self._streams: list[LayerStream] = []
        # Of one layer: what each matrix gets, and would get with the model's own weights.
        self._inputs: dict[str, np.ndarray] = {}
        self._exact: dict[str, np.ndarray] = {}
        self._made: dict[str, BlockQuantized] = {}  # by the first names of groups

    def take(self, names: Sequence[str]) -> BlockQuantized:
        """The matrices of one group, above each other; each group is asked for once, in order."""
        bits = 8 if names[0] == _OF_ALL_LAYERS else self._bits
        if bits == 8 or self._is_carried(names) or not self._texts:
            return quantize_stored(self._stored(names), bits)
        while names[0] not in self._made:
            self._advance()
        return self._made.pop(names[0])

    def names(self) -> Iterator[str]:
        return self._checkpoint.names()

    def float32(self, name: str) -> np.ndarray:
        group = self._group(name)
        if not group or self._is_carried(group):
            return self._checkpoint.float32(name)
        if group[0] not in self._made:
            self._made[group[0]] = self._fit(group, name)
        found = self._made[group[0]]
        before = self._stored(group[: group.index(name)])
        start = sum(tensor.shape[0] for tensor in before)
        rows = slice(start, start + self._checkpoint.tensors[name].shape[0])
        return found.rows(rows).dequantize()

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self._checkpoint.float32_rows(name, rows)

    def _advance(self) -> None:
        if not self._streams:
            self._streams = self._opened()
        for stream in self._streams:
            stream.advance()
        self._exact.clear()
        self._inputs.clear()

    def _opened(self) -> list[LayerStream]:
        """The stream with the model's weights goes ahead, where it can tell anything."""
        config, texts = self.config, self._texts
        streams = [runtimes.load_layer_stream(self, texts, self._inputs.__setitem__)]
        if min(config.hidden_size, config.query_size) <= sum(map(len, texts)):
            source = self._checkpoint
            streams.insert(0, runtimes.load_layer_stream(source, texts, self._exact.__setitem__))
        return streams

    @cached_property
    def _texts(self) -> list[list[int]]:
        if self.config.encoder is not None:  # a stream of layers has no source
            return []
        max_tokens = int(_MAX_WORK / self.config.num_parameters)
        max_tokens = min(max(max_tokens, _MIN_TOKENS), _MAX_TOKENS)
        return calibration_sequences(self._checkpoint, max_tokens)

    def _fit(self, group: Sequence[str], name: str) -> BlockQuantized:
        """name: the first of the group that was multiplied; all have the same inputs."""
        inputs, exact = self._inputs[name], self._exact.get(name)
        correction = None
        if exact is not None and len(inputs) >= inputs.shape[1]:
            correction = input_correction(inputs, exact)
        weighed = importance(inputs)
        stored = [replace(tensor, importance=weighed) for tensor in self._stored(group)]
        return quantize_stored(stored, self._bits, correction)

    def _group(self, name: str) -> list[str]:
        """The matrices of the one's group that a model has; none for what is no matrix of a
        layer."""
        for group in _GROUPS:
            for suffix in group:
                if name.endswith(f".{suffix}.weight"):
                    prefix = name.removesuffix(f"{suffix}.weight")
                    names = (f"{prefix}{each}.weight" for each in group)
                    return [each for each in names if each in self._checkpoint.tensors]
        return []

    def _is_carried(self, names: Sequence[str]) -> bool:
        return is_carried(self._stored(names), self._bits)

    def _stored(self, names: Sequence[str]) -> list[StoredTensor]:
        return [self._checkpoint.tensors[name] for name in names]
