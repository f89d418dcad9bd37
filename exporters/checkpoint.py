"""One reader for published models: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_spec.architecture import ModelConfig
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.stored_tensor import StoredTensor

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")  # SmolLM is "llama"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as published; weights stay on disk until they are asked for.

    Raises ModelFileError when it is made unless every tensor that `config` implies is there in
    its shape, UnsupportedModelError if there are layers' weights that `config` does not imply.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool  # whether every prompt begins with it
    read_tokenizer: Callable[[], str]

    def __post_init__(self) -> None:
        expected = expected_shapes(self.config)
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
                raise ModelFileError(
                    f"{self.path}: tensor {name} {found}, expected {list(shape)}",
                    remedy="Download or convert the model again.",
                )
        extra = [n for n in self.tensors if n.startswith("model.layers.") and n not in expected]
        extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
        if extra:
            raise UnsupportedModelError(
                f"{self.path} has weights that this version does not use, such as {extra[0]}",
                remedy=f"Supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)}.",
            )

    def names(self) -> Iterator[str]:
        return iter(expected_shapes(self.config))

    def float32(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()

    def tokenizer_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` library."""
        return self.read_tokenizer()


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file or a directory with config.json and safetensors.

    Raises ModelFileError where the path is missing, damaged or neither of the two.
    """
    if not path.exists():
        raise ModelFileError(f"no such file or directory: {path}", remedy="Check the path.")
    if path.is_dir():
        from edge_spec.exporters.hf_source import open_directory

        return open_directory(path)
    from edge_spec.exporters.gguf_source import open_gguf

    return open_gguf(path)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of this family: name -> shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[attention + "q_proj.weight"] = (config.query_size, hidden)
        shapes[attention + "k_proj.weight"] = (config.kv_size, hidden)
        shapes[attention + "v_proj.weight"] = (config.kv_size, hidden)
        shapes[attention + "o_proj.weight"] = (hidden, config.query_size)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        if config.qkv_bias:
            shapes[attention + "q_proj.bias"] = (config.query_size,)
            shapes[attention + "k_proj.bias"] = (config.kv_size,)
            shapes[attention + "v_proj.bias"] = (config.kv_size,)
        if config.output_bias:
            shapes[attention + "o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[attention + "q_norm.weight"] = (config.head_dim,)
            shapes[attention + "k_norm.weight"] = (config.head_dim,)
    return shapes
