"""Writes GGUF files of random weights in the shapes of real models, for benchmarks of kernels.

All layers have the same bytes, which no kernel can notice: each stands in memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


SHAPES: Mapping[str, Shape] = {
    "3B": Shape(3072, 8192, 24, 8, 128_256, 28),  # Llama 3.2
    "7B": Shape(4096, 14_336, 32, 8, 32_768, 32),  # Mistral 0.3
}


# Of the weights that random bytes stand for in each type: their standard deviation, in units of a
# block's scale, and in the same units the minimum at which their mean is 0, where there is one.
_BLOCKS: Mapping[str, tuple[float, float | None]] = {
    "Q4_0": (4.6, None),
    "Q4_1": (4.6, -7.5),
    "Q5_0": (9.2, None),
    "Q5_1": (9.2, -15.5),
    "Q8_0": (74.0, None),
    "Q4_K": (258.0, 7.5),
    "Q5_K": (522.0, 15.5),
}


def write_random(path: Path, shape: Shape, type_name: str, layers: int | None = None) -> None:
    """layers: fewer than the model has."""
    layers = min(layers or shape.layers, shape.layers)
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, shape, layers)
    _write_vocabulary(writer, shape.vocab)
    random = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[type_name]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return _random_rows(random, type_name, rows, columns)

    def add(name: str, data: np.ndarray) -> None:
        writer.add_tensor(name, data, raw_dtype=kind if data.dtype == np.uint8 else None)

    kv_rows, ones = shape.head_size * shape.kv_heads, np.ones(shape.hidden, np.float32)
    layer = {
        "attn_norm": ones,
        "attn_q": matrix(shape.hidden, shape.hidden),
        "attn_k": matrix(kv_rows, shape.hidden),
        "attn_v": matrix(kv_rows, shape.hidden),
        "attn_output": matrix(shape.hidden, shape.hidden),
        "ffn_norm": ones,
        "ffn_gate": matrix(shape.feed_forward, shape.hidden),
        "ffn_up": matrix(shape.feed_forward, shape.hidden),
        "ffn_down": matrix(shape.hidden, shape.feed_forward),
    }
    add("token_embd.weight", matrix(shape.vocab, shape.hidden))  # and the output matrix
    add("output_norm.weight", ones)
    for i in range(layers):
        for name, data in layer.items():
            add(f"blk.{i}.{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> None:
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_block_count(layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(shape.vocab)


def _write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Writes a SentencePiece vocabulary of bytes, which reads any text, and of words."""
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    tokens += [("\u2581", kinds.NORMAL)]
    tokens += [(f"\u2581word{number}", kinds.NORMAL) for number in range(size - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _random_rows(
    random: np.random.Generator, type_name: str, rows: int, columns: int
) -> np.ndarray:
    """Returns a matrix's bytes, whose weights keep the size of what they multiply."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = random.integers(0, 256, (rows * columns // values, size), np.uint8)
    deviation, minimum = _BLOCKS[type_name]
    scale = 1 / (deviation * np.sqrt(columns))
    fields = [scale] if minimum is None else [scale, scale * minimum]
    blocks[:, : 2 * len(fields)] = np.array(fields, np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
