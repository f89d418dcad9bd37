"""Run torch, transformers, optimum and onnxruntime's quantizer, in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

GRAPH_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
TOKENS_FILE, SCORES_FILE = "tokens.json", "scores.npy"
UNSTATED_CONTEXT_TOKENS = 2048  # of models without a limit of their own, such as those with ALiBi
_TASK = "text-generation-with-past"
# Keys and values beyond a sliding window are tried where the window is this long or shorter, with
# so many tokens more.
_TRIED_WINDOW_TOKENS, _BEYOND_WINDOW_TOKENS = 1024, 64
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
_WINDOWS = ("sliding_window", "window_size", "attention_window")
# Whose frequencies change with the length of the text: a traced graph has those of a short one.
_CHANGING_ROPES = ("dynamic", "longrope")
_EXTERNAL_BYTES = 1024  # smaller tensors stay in the graph's own file


def write_graph(
    directory: str, scratch: str, out: str, bits: str, block_size: str
) -> dict[str, Any]:
    """Score a text, TOKENS_FILE in `scratch`, with transformers in float32 into SCORES_FILE beside
    it, and write the graph to `out`, its matrices in blocks of fewer `bits` than 32.

    Return "config", of a ModelConfig, "tokens" that were scored, and "notes". Raises what the
    libraries raise, such as for an architecture that optimum does not know.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    warnings.simplefilter("ignore")  # of tracing, for each constant that depends on a shape
    import onnx
    import torch
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    model, loaded = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if loaded["missing_keys"] or loaded["mismatched_keys"]:
        names = sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]]))
        raise ValueError(f"the weights of {names[0]} are missing or of another shape")
    model.eval()
    text = json.loads((Path(scratch) / TOKENS_FILE).read_text(encoding="ascii"))
    context, tokens, notes = plan_text(config, text)
    with torch.no_grad():
        scores = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    np.save(Path(scratch) / SCORES_FILE, scores.float().numpy())
    model.config.use_cache = True
    head = model.get_output_embeddings()
    if bits != "32" and head is not None:  # the quantizer takes constants only, no transposed table
        head.weight = torch.nn.Parameter(head.weight.clone())
        model.config.tie_word_embeddings = False
    raw = Path(scratch) / "raw"
    # What main_export calls once it has loaded the model, which would be a second time here.
    onnx_export_from_model(model, raw, task=_TASK, do_validation=False)
    described = _described(config, raw / GRAPH_FILE, scores.shape[1], context)
    graph = onnx.load(str(raw / GRAPH_FILE))
    shutil.rmtree(raw)
    _save(graph if bits == "32" else _quantize(graph, int(bits), int(block_size)), Path(out))
    return {"config": described, "tokens": tokens, "notes": notes}


def _quantize(graph: Any, bits: int, block_size: int) -> Any:
    """Return the graph with the constant matrices of all products in symmetric blocks, the head's
    of 8 bits."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = ONNXModel(graph)
    model.replace_gemm_with_matmul()  # the quantizer leaves Gemm as it is
    graph = model.model.graph
    vocab_size = graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    heads = [n.name for n in products if list(shapes.get(n.input[1], ()))[1:] == [vocab_size]]
    for chosen_bits, excluded in ((bits, heads), (8, [])):  # what is packed is no MatMul any more
        quantizer = MatMulNBitsQuantizer(
            model.model,
            bits=chosen_bits,
            block_size=block_size,
            is_symmetric=True,
            accuracy_level=4,  # activations in int8
            nodes_to_exclude=excluded,
        )
        quantizer.process()
        model = quantizer.model
    return model.model


def plan_text(config: Any, text: list[int]) -> tuple[int, list[int], list[str]]:
    """The context in tokens, the tokens to score, and what had to be limited.

    The tokens reach beyond a sliding window; where that would be too many, the context ends with
    the window, within which every model attends to all of its past.
    """
    lengths = [getattr(config, name, None) for name in _LENGTHS]
    context = next((length for length in lengths if length), UNSTATED_CONTEXT_TOKENS)
    notes = []
    unchanged = _unchanged_tokens(config)
    if unchanged is not None and unchanged < context:
        notes.append(f"The context is limited to {unchanged} tokens: beyond, rotations change.")
        context = unchanged
    windows = [getattr(config, name, None) for name in _WINDOWS]
    window = min((w for w in windows if isinstance(w, int) and 0 < w < context), default=None)
    if window is not None and window > _TRIED_WINDOW_TOKENS:
        notes.append(f"The context is limited to the sliding window of {window} tokens.")
        context = window
    elif window is not None:
        wanted = max(window + _BEYOND_WINDOW_TOKENS, len(text))
        text = (text * (wanted // len(text) + 1))[:wanted]
    return context, text[:context], notes


def _unchanged_tokens(config: Any) -> int | None:
    """Up to which length the rotary embedding is that of a short text."""
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) not in _CHANGING_ROPES:
        return None
    name = "original_max_position_embeddings"
    found: int | None = scaling.get(name) or getattr(config, name, None)
    return found


def _described(config: Any, graph: Path, vocab_size: int, context: int) -> dict[str, Any]:
    """The fields of a ModelConfig; 0 for what this architecture does not state."""
    import onnx

    inputs = onnx.load(str(graph), load_external_data=False).graph.input
    past = {value.name: value.type.tensor_type.shape.dim for value in inputs}
    keys = past["past_key_values.0.key"]
    inner = next((getattr(config, n, None) for n in ("intermediate_size", "ffn_dim")), None)
    return {
        "architecture": config.model_type,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": inner or 0,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": keys[1].dim_value,
        "head_dim": keys[3].dim_value,
        "vocab_size": vocab_size,
        "context_length": context,
        "norm_epsilon": 0.0,
        "rope_theta": float(getattr(config, "rope_theta", None) or 0.0),
        "tied_embeddings": bool(config.tie_word_embeddings),
    }


def _save(model: Any, out: Path) -> None:
    """The graph and one file of weights, which onnxruntime maps."""
    import onnx

    onnx.save_model(
        model,
        str(out / GRAPH_FILE),
        save_as_external_data=True,
        location=DATA_FILE,
        size_threshold=_EXTERNAL_BYTES,
    )
    (out / DATA_FILE).chmod(0o644)  # onnx makes it private
