"""Convert a causal Hugging Face model to ONNX with optimum, in a separate process."""

from __future__ import annotations

import json
import os
import reprlib
import shutil
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.errors import (
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
    install,
)
from edge_spec.exporters.checkpoint import ModelText
from edge_spec.exporters.hf_source import (
    CONFIG,
    TOKENIZER_CONFIG,
    Files,
    text_fields,
    weight_files,
)
from edge_spec.exporters.parity import Parity, compare, parity_tokens, require_near, scores_by
from edge_spec.exporters.requests import (
    BLOCK_SIZE,
    BlockQuantization,
    chosen_quantization,
    describe,
    report_bundle,
    require_replaceable,
)
from edge_spec.exporters.stored_tensor import damaged
from edge_spec.models.bundle import Bundle
from edge_spec.storage.atomic import atomic_directory, scratch_beside

GRAPH_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
TOKENS_FILE, SCORES_FILE = "tokens.json", "scores.npy"
UNSTATED_CONTEXT_TOKENS = 2048  # if the model has no limit, such as with ALiBi
_TASK = "text-generation-with-past"
# Windows up to this length are checked, by a text with so many more tokens.
_TRIED_WINDOW_TOKENS, _BEYOND_WINDOW_TOKENS = 1024, 64
_ORIGINAL = "original_max_position_embeddings"
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
_WINDOWS = ("sliding_window", "window_size", "attention_window")
# Frequencies change with the text's length; a traced graph keeps those of a short text.
_CHANGING_ROPES = ("dynamic", "longrope")
_EXTERNAL_BYTES = 1024  # smaller tensors stay in the graph


def write_graph(directory: str, scratch: str, out: str, bits: str) -> dict[str, Any]:
    """Score TOKENS_FILE with transformers in float32 to SCORES_FILE, both in `scratch`; write the
    graph to `out`, its matrices in blocks if `bits` is below 32.

    Return "config" (ModelConfig fields), "tokens" (those scored) and "notes". Raises what the
    libraries raise, such as for an unknown architecture.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    warnings.simplefilter("ignore")  # tracing warns of each shape
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
    if bits != "32" and head is not None:  # the quantizer needs a constant, not a transposed table
        head.weight = torch.nn.Parameter(head.weight.clone())
        model.config.tie_word_embeddings = False
    raw = Path(scratch) / "raw"
    # main_export would load the model again.
    onnx_export_from_model(model, raw, task=_TASK, do_validation=False)
    graph = onnx.load(str(raw / GRAPH_FILE))
    described = _described(config, graph, scores.shape[1], context)
    shutil.rmtree(raw)
    onnx.save_model(
        graph if bits == "32" else _quantize(graph, int(bits)),
        str(Path(out) / GRAPH_FILE),
        save_as_external_data=True,
        location=DATA_FILE,
        size_threshold=_EXTERNAL_BYTES,
    )
    (Path(out) / DATA_FILE).chmod(0o644)  # onnx makes it private
    return {"config": described, "tokens": tokens, "notes": notes}


def _quantize(graph: Any, bits: int) -> Any:
    """Return the graph with constant matrices in symmetric blocks, the head's in 8 bits."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = ONNXModel(graph)
    model.replace_gemm_with_matmul()  # the quantizer leaves Gemm as it is
    graph = model.model.graph
    vocab_size = graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    heads = [n.name for n in products if list(shapes.get(n.input[1], ()))[1:] == [vocab_size]]
    for chosen_bits, excluded in ((bits, heads), (8, [])):  # packed ones are MatMul no more
        quantizer = MatMulNBitsQuantizer(
            model.model,
            bits=chosen_bits,
            block_size=BLOCK_SIZE,
            is_symmetric=True,
            accuracy_level=4,  # activations in int8
            nodes_to_exclude=excluded,
        )
        quantizer.process()
        model = quantizer.model
    return model.model


def plan_text(config: Any, text: list[int]) -> tuple[int, list[int], list[str]]:
    """Return the context length, the tokens to score and notes on limits.

    Tokens reach beyond a short sliding window. A longer one ends the context, since attention
    within it is full; so does a changing rotation.
    """
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    context: int = next((length for length in lengths if length), UNSTATED_CONTEXT_TOKENS)
    stated = [getattr(config, name, None) for name in _WINDOWS]
    windows = [each for each in stated if isinstance(each, int) and 0 < each < context]
    ends: list[int] = [each for each in windows if each > _TRIED_WINDOW_TOKENS]
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) in _CHANGING_ROPES:
        ends.append(scaling.get(_ORIGINAL) or getattr(config, _ORIGINAL, None) or context)
    notes = []
    if min(ends, default=context) < context:
        context = min(ends)
        notes = [f"The context is limited to {context} tokens: beyond, attention changes."]
    tried = [each + _BEYOND_WINDOW_TOKENS for each in windows if each not in ends]
    wanted = max([len(text), *tried])
    text = (text * (wanted // len(text) + 1))[:wanted]
    return context, text[:context], notes


def _described(config: Any, model: Any, vocab_size: int, context: int) -> dict[str, Any]:
    past = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
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


LIBRARY = "optimum-onnx"
_TIMEOUT_S = 4 * 3600.0  # by then it hangs
_MAX_REASON = 300  # characters
_REMEDY = "Use more bits (--quant int8 or fp32), another model, or --no-check."
# The same bounds as in exporters/onnx.
QUANTIZATIONS = {
    "int4": BlockQuantization(4, 1.0),
    "int8": BlockQuantization(8, 0.02),
    "fp32": BlockQuantization(32, 1e-4),
}


@dataclass(frozen=True)
class OptimumSource(ModelText):
    """A model directory that can be read without running its code."""

    model_type: str


class OptimumExporter:
    format = "onnx"

    def open_source(self, path: Path) -> OptimumSource:
        """Raises MissingDependencyError if only optimum is missing."""
        source = open_source(path)
        try:
            version(LIBRARY)
        except PackageNotFoundError:
            raise MissingDependencyError(
                f"{source.model_type} models are exported by optimum, which is not installed",
                remedy=f"{install('optimum')}.",
            ) from None
        return source

    def export(
        self, source: OptimumSource, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out` and compare it with transformers. Also raises ExportError if
        optimum fails."""
        out = out.absolute()
        options.require_only("optimum")
        name = chosen_quantization(options, QUANTIZATIONS)
        if options.num_layers is not None:
            raise UsageError(
                "the optimum exporter cannot leave layers out", remedy="Leave --layers out."
            )
        require_replaceable(out)
        quantization = QUANTIZATIONS[name]

        def on_chunk(done: float) -> None:
            progress("Comparing with transformers", done)

        progress("Exporting with optimum", 0.0)
        text = parity_tokens(source.path, source.tokenizer_json())
        with scratch_beside(out) as scratch, atomic_directory(out) as work:
            (scratch / TOKENS_FILE).write_text(json.dumps(text), encoding="ascii")
            arguments = map(str, (source.path, scratch, work, quantization.bits))
            try:
                written = dict(isolated(write_graph, *arguments, timeout_s=_TIMEOUT_S))
            except IsolatedError as error:
                raise ExportError(
                    f"optimum cannot export {source.path}: {str(error)[:_MAX_REASON]}",
                    remedy="Use a causal language model of an architecture that optimum exports; "
                    "check its files and the versions of optimum's extra.",
                ) from error

            def compared(bundle: Bundle) -> Parity:
                tokens, scores = written["tokens"], np.load(scratch / SCORES_FILE, "r")
                found = scores_by("ort", bundle, tokens, on_chunk, (32, 1))
                parity = compare(scores, found, tokens)
                return require_near(source.path, parity, quantization.max_kl_divergence, _REMEDY)

            describe(
                work,
                source,
                ModelConfig.from_dict(written["config"]),
                format=self.format,
                quantization=name if name == "fp32" else f"{name} block {BLOCK_SIZE}",
                check=compared if options.check else None,
                kv_cache="growing",
                notes=written["notes"],
            )
        return report_bundle(out)


def open_source(path: Path) -> OptimumSource:
    """Read all but the weights. Raises ModelFileError, UnsupportedModelError."""
    if not path.is_dir():
        raise UnsupportedModelError(
            f"{path} is no directory, which is all that optimum exports",
            remedy="Give a Hugging Face directory with config.json and safetensors.",
        )
    files = Files(path)
    for name in (CONFIG, TOKENIZER_CONFIG):
        if files[name].get("auto_map"):
            raise UnsupportedModelError(
                f"{path / name} asks to run code of the model's own (auto_map)",
                remedy="Only architectures that transformers brings itself can be exported.",
            )
    values = files[CONFIG]
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise damaged(f"{path / CONFIG}: model_type is {reprlib.repr(model_type)}")
    if values.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{path / CONFIG} is of a model with an encoder and a decoder",
            remedy="Only models that write text token by token, without an encoder, can run.",
        )
    if "quantization_config" in values:
        raise UnsupportedModelError(
            f"{path / CONFIG}: the weights are quantized already",
            remedy="Export the model that they were quantized from.",
        )
    weight_files(path)
    return OptimumSource(path, model_type, **text_fields(files, values))
