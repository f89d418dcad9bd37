"""What writers and runtimes cannot compute, and which other runtime runs such a model."""

from __future__ import annotations

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.checkpoint import StoredCheckpoint

_ROTATED = 16  # elements; onnxruntime's GroupQueryAttention rotates multiples of it


def gguf_architecture(config: ModelConfig) -> str:
    """llama.cpp runs Mistral's models as "llama", MiMo's, without MTP layers, as "qwen2"."""
    same = {"mistral": "llama", "mimo": "qwen2"}  # as which llama.cpp runs them
    return same.get(config.architecture, config.architecture)


def head_problem(config: ModelConfig) -> str | None:
    """Return why onnxruntime cannot compute the model's attention."""
    for layer in config.attending:
        size, rotation = config.heads(layer).head_dim, config.rotation(config.kind(layer))
        if size % _ROTATED:
            return (
                f"onnxruntime needs a head size that is a multiple of {_ROTATED}, this model has "
                f"{size}"
            )
        if rotation is None or rotation.size == size:
            continue
        rotates = f"this model rotates {rotation.size} of the {size} elements of a head"
        if config.qk_norm_after_rope:
            return f"{rotates} before it normalizes them, which onnxruntime does not"
        if rotation.size % _ROTATED:
            return f"onnxruntime rotates multiples of {_ROTATED} elements, {rotates}"
    return None


def is_composed(config: ModelConfig) -> bool:
    """Returns whether a model's experts are nodes of their own, not one operator."""
    experts = config.experts
    if experts is None or experts.clamp is not None:
        return False
    return config.activation != "silu" or experts.expert_scales


def uncomposed(config: ModelConfig) -> str | None:
    """Returns in words what such experts have that these nodes do not compute."""
    experts = config.experts
    if experts is None or not is_composed(config):
        return None
    if experts.sigmoid or experts.choice_bias:
        return "are weighed by sigmoids"
    return "have biases" if experts.biases else None


def architecture_problem(config: ModelConfig) -> str | None:
    """Return what llama.cpp ignores, or refuses: what an architecture does not usually have."""
    architecture, scaling = gguf_architecture(config), config.rope_scaling
    problems = {
        "its rotary frequencies are scaled one by one": architecture != "llama"
        and scaling is not None
        and scaling.kind != "linear",
        "its rotations are scaled, too": scaling is not None and scaling.magnitude != 1.0,
        "its attention output has a bias": architecture != "llama" and config.output_bias,
        "it normalizes queries and keys": architecture != "qwen3" and config.qk_norm,
        "it does not normalize queries and keys": architecture == "qwen3" and not config.qk_norm,
        "its heads are not as wide as the model": architecture == "qwen2"
        and config.query_size != config.hidden_size,
    }
    return next((problem for problem, found in problems.items() if found), None)


def other_runtime(checkpoint: StoredCheckpoint, refusing: str) -> str:
    """Return the fastest of the other runtimes that runs the model as it is stored."""
    config = checkpoint.config
    if refusing != "ort" and head_problem(config) is None and uncomposed(config) is None:
        return "ort"
    converts = not config.features() and architecture_problem(config) is None
    is_gguf = checkpoint.path.is_file()  # which llama.cpp reads as it is
    if refusing != "llamacpp" and config.encoder is None and (is_gguf or converts):
        return "llamacpp"
    return "reference"


def other_export(checkpoint: StoredCheckpoint, refusing: str) -> str:
    """Return what to do with a model that an export cannot write."""
    other = other_runtime(checkpoint, refusing)
    return "Export it with --format onnx." if other == "ort" else f"Run it with --runtime {other}."
