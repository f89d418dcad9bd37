"""The model that processors.py tries, as each runtime reads it; made on the real machine.

It is the demo model with the first LAYERS of its layers and the first TOKENS of its tokens: its
matrices are as wide as the whole model's, and an emulated processor computes a pass in a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import MappingProxyType

from edge_spec.core.export import ExportOptions
from edge_spec.exporters.checkpoint import StoredCheckpoint, expected_shapes, first_layers
from edge_spec.models import runtimes
from edge_spec.models.source import fetch_demo_model

TESTS = Path(__file__).parents[1] / "tests"
LAYERS, TOKENS, CONTEXT = 2, 4096, 512
# Name of a case -> its runtime, and the format and quantization that it reads.
CASES = MappingProxyType(
    {
        "ort int4": ("ort", "onnx", "int4"),
        "ort int8": ("ort", "onnx", "int8"),
        "ort fp32": ("ort", "onnx", "fp32"),
        "llamacpp Q4_0": ("llamacpp", "gguf", "Q4_0"),
        "llamacpp Q8_0": ("llamacpp", "gguf", "Q8_0"),
        "reference": ("reference", None, None),
    }
)


def convert(model: Path, case: str, folder: Path) -> Path:
    """Writes what the case's runtime reads into the folder; `model` is a Hugging Face directory."""
    _, format, quantization = CASES[case]
    if format is None:
        return model
    out = folder / (case.replace(" ", "-") + (".gguf" if format == "gguf" else ""))
    options = ExportOptions(quantization, check=False)
    checkpoint = runtimes.open_checkpoint(model)
    runtimes.load_exporter(format).export(checkpoint, out, options, lambda what, fraction: None)
    return out


def write_small_demo(folder: Path) -> Path:
    """The first layers and tokens of the demo model as a Hugging Face directory."""
    sys.path.insert(0, str(TESTS))
    from fixtures import tiny_models

    demo = runtimes.open_checkpoint(fetch_demo_model(lambda what, fraction: None))
    demo = first_layers(demo, LAYERS)
    weights = {name: demo.float32(name)[: shape[0]] for name, shape in _shapes(demo).items()}
    tiny_models.write_hf(tiny_models.TinyModel(_config(demo), weights), folder)
    tokenizer = _first_tokens(json.loads(demo.tokenizer_json()))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def _shapes(demo: StoredCheckpoint) -> dict[str, tuple[int, ...]]:
    shapes = expected_shapes(demo.config)
    embedding = "model.embed_tokens.weight"  # the head, too
    return {**shapes, embedding: (TOKENS, *shapes[embedding][1:])}


def _config(demo: StoredCheckpoint) -> dict[str, object]:
    """Returns the config.json of the small model."""
    config = demo.config
    return {
        "model_type": config.architecture,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": TOKENS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": demo.bos_id,
        "eos_token_id": demo.eos_ids[0],
    }


def _first_tokens(tokenizer: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Tokens are numbered in the order in which they were merged: the first ones are a
    tokenizer."""
    model = tokenizer["model"]
    vocabulary: dict[str, int] = model["vocab"]
    kept = {token: number for token, number in vocabulary.items() if number < TOKENS}
    merges = [pair for pair in model["merges"] if "".join(pair) in kept]
    return {**tokenizer, "model": {**model, "vocab": kept, "merges": merges}}
