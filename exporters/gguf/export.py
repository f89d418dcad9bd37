"""Write a checkpoint as one GGUF file, by the metadata keys of ggml's docs/gguf.md. llama.cpp's
quantizer writes mixed types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import quants
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUFValueType,
    LlamaFileType,
)
from gguf.constants import (
    GGMLQuantizationType as Kind,
)

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated, tell
from edge_spec.core.model import Progress
from edge_spec.errors import (
    ExportError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
    install,
    readable,
)
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.families import BY_ARCHITECTURE
from edge_spec.exporters.families.family import LAYER_NAMES, MODEL_NAMES, turned
from edge_spec.exporters.gguf.vocabulary import Pairs, tokenizer_metadata
from edge_spec.exporters.gguf_model_info import MODEL_KEYS, SAMPLING_KEYS, open_model_info
from edge_spec.exporters.gguf_reader import MAGIC, GgufFile
from edge_spec.exporters.parity import against_reference, scores_by
from edge_spec.exporters.requests import (
    OTHER_FORMAT,
    chosen_quantization,
    require_plain,
)
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.storage.atomic import atomic_file, scratch_beside

# Of the types with about 4.5 bits, loses least (benchmarks/results/quantizations.json); needs
# llama.cpp.
DEFAULT_QUANTIZATION = "Q4_K_M"
WITHOUT_LIBRARY = "Q4_0"
_REMEDY = "Use more bits (--quant Q8_0 or F16)."

# Largest allowed divergence in nats: several times what the demo model measures
# (benchmarks/results/quantizations.json), to stop broken exports, not lossy ones.
QUANTIZATIONS = {
    "F32": 1e-3,
    "F16": 1e-3,
    "BF16": 5e-3,
    "Q8_0": 0.03,
    "Q5_1": 0.6,
    "Q5_0": 0.6,
    "Q4_1": 1.5,
    "Q4_0": 1.5,
    "Q6_K": 0.06,
    "Q5_K_M": 0.5,
    "Q5_K_S": 0.5,
    "Q4_K_M": 1.0,
    "Q4_K_S": 1.0,
    "Q3_K_L": 2.0,
    "Q3_K_M": 2.0,
    "Q3_K_S": 3.0,
    "Q2_K": 4.0,
}


def _types(name: str) -> tuple[LlamaFileType, Kind | None]:
    """Return the type of the file and of its matrices (None: llama.cpp chooses for each)."""
    file_type = LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"]
    return file_type, None if "_K" in name else Kind[name]


class GgufExporter:
    format = "gguf"

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        """Raises UnsupportedModelError for what the writer or llama.cpp does not support."""
        config = checkpoint.config
        require_plain(checkpoint, "GGUF")
        problem = _problem(config)
        if problem is not None:
            raise UnsupportedModelError(
                f"llama.cpp does not run {checkpoint.path} as a {gguf_architecture(config)!r} "
                f"model: {problem}",
                remedy=OTHER_FORMAT,
            )

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the file `out` and compare it with the reference."""
        out = out.absolute()
        name = _checked(checkpoint, out, options)
        self.require_exportable(checkpoint)
        file_type, kind = _types(name)
        checkpoint = first_layers(checkpoint, options.num_layers)
        stated = stated_metadata(checkpoint.path)
        metadata = model_metadata(checkpoint, file_type, stated)
        metadata |= tokenizer_metadata(checkpoint, stated)
        architecture = gguf_architecture(checkpoint.config)
        tensors = list(gguf_tensors(checkpoint, kind))
        parity: dict[str, float] = {}
        with atomic_file(out) as work:
            if kind is not None:
                write_gguf(work, architecture, metadata, tensors, progress)
            else:
                with scratch_beside(out) as folder:
                    whole = folder / "whole.gguf"
                    write_gguf(whole, architecture, metadata, tensors, progress)
                    quantize(whole, work, file_type, progress)
            written = open_model_info(work)  # raises if incomplete
            if options.check:
                runtime = "llamacpp" if find_spec(LIBRARY) else "reference"
                score, bound = partial(scores_by, runtime), QUANTIZATIONS[name]
                compared = against_reference(checkpoint, score, bound, progress, _REMEDY)
                parity = compared(written)._asdict()
        return ExportReport(out, out.stat().st_size, parity)

    def requantize(self, source: Path, out: Path, quantization: str, progress: Progress) -> None:
        """Give every matrix this type, also embeddings and outputs, without a parity check.

        Raises ExportError, MissingDependencyError.
        """
        require_library(quantization)
        file_type, kind = _types(quantization)
        quantize(source, out, file_type, progress, outputs=kind)


def gguf_architecture(config: ModelConfig) -> str:
    """Return llama.cpp's name: Mistral runs as "llama", MiMo without MTP layers as "qwen2"."""
    same = {"mistral": "llama", "mimo": "qwen2"}
    return same.get(config.architecture, config.architecture)


def _problem(config: ModelConfig) -> str | None:
    """Return a feature that llama.cpp ignores or refuses in this architecture."""
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


def _checked(checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> str:
    options.require_only(GgufExporter.format)
    usual = DEFAULT_QUANTIZATION if find_spec(LIBRARY) else WITHOUT_LIBRARY
    wanted = usual if options.quantization is None else options.quantization
    if wanted.upper() in QUANTIZATIONS:
        wanted = wanted.upper()
    name = chosen_quantization(replace(options, quantization=wanted), QUANTIZATIONS)
    if not out.parent.is_dir():
        raise UsageError(
            f"there is no directory {out.parent}", remedy="Create it, or choose another place."
        )
    if out.is_dir():
        raise UsageError(f"{out} is a directory", remedy="Give the name of a file in it.")
    if out.exists() and not _may_replace(out):
        raise UsageError(f"{out} exists and is not a GGUF file", remedy="Choose another name.")
    if out.exists() and out.samefile(checkpoint.path):
        raise UsageError(f"{out} is the model itself", remedy="Choose another name.")
    if _types(name)[1] is None:
        require_library(name)
    return name


def _may_replace(out: Path) -> bool:
    if not out.is_file():
        return False
    with out.open("rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


LIBRARY = "llama_cpp"
_TIMEOUT_S = 24 * 3600.0
_COUNTER = re.compile(r"\[ *(\d+)/ *(\d+)\]")


def require_library(name: str) -> None:
    """Raises MissingDependencyError, which names the quantization."""
    if find_spec(LIBRARY) is None:
        raise MissingDependencyError(
            f"quantization {name} is made by llama-cpp-python, which is not installed",
            remedy=f"{install('llamacpp')}, or export with --quant Q4_0.",
        )


def quantize(
    source: Path,
    target: Path,
    file_type: LlamaFileType,
    progress: Progress,
    outputs: Kind | None = None,
) -> None:
    """Write `target`, in a separate process: the library cannot be stopped, exits when a check
    fails, and has one log callback. Tensors of their type are copied bit for bit. outputs: the
    output matrix's type (None: a better one than the others'). Raises ExportError."""
    arguments = [str(source), str(target), str(int(file_type))]
    arguments += [] if outputs is None else [str(int(outputs))]
    try:
        isolated(
            run_library,
            *arguments,
            timeout_s=_TIMEOUT_S,
            on_step=lambda done: progress("Quantizing with llama.cpp", done),
        )
    except IsolatedError as error:
        raise ExportError(
            f"llama.cpp could not quantize the model: {error}",
            remedy="Export with --quant Q4_0 or Q8_0.",
        ) from None


def run_library(source: str, target: str, file_type: str, outputs: str = "") -> None:
    import ctypes
    import os

    import llama_cpp

    api: Any = llama_cpp
    last = ""

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def on_line(level: int, text: bytes | None, data: Any) -> None:
        nonlocal last
        last = (text or b"").decode("utf-8", "replace").strip() or last
        if counter := _COUNTER.match(last):
            tell(int(counter[1]) / int(counter[2]))

    api.llama_log_set(on_line, None)
    params = api.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.allow_requantize = True
    if outputs:
        params.output_tensor_type = int(outputs)
    status = api.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    if status:
        raise RuntimeError(f"status {status}: {last}")


_COMPUTED = ("architecture", "alignment", "file_type", "quantization_version")
_DTYPES: dict[GGUFValueType, np.dtype[Any]] = {
    kind: np.dtype(kind.name.lower())
    for kind in GGUFValueType
    if kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY)
}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
_OF_PYTHON = {bool: np.bool_, int: np.uint32, float: np.float32}  # 32 bits for numbers


def stated_metadata(path: Path) -> Pairs:
    """Return a GGUF file's metadata, numbers in their stored types; {} for a directory."""
    if path.is_dir():
        return {}
    file = GgufFile(path)
    stated: Pairs = {}
    for key, value in file.metadata.items():
        dtype = _DTYPES.get(GGUFValueType(file.kinds[key]))
        stated[key] = value if dtype is None else np.array(value, dtype)[()]
    return stated


def model_metadata(checkpoint: StoredCheckpoint, file_type: LlamaFileType, stated: Pairs) -> Pairs:
    """Return all metadata but the tokenizer's. stated: the source's, whose general keys are
    kept."""
    config = checkpoint.config
    architecture = gguf_architecture(config)
    path = checkpoint.path.resolve()
    computed = {f"general.{key}" for key in _COMPUTED}
    described = {k: v for k, v in stated.items() if k.startswith("general.") and k not in computed}
    metadata: Pairs = {
        "general.type": "model",
        "general.name": readable(path.stem if path.is_file() else path.name),
        **_sampling(checkpoint),
        **described,
        "general.file_type": int(file_type),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    of_model: Pairs = {key: getattr(config, field) for key, field in MODEL_KEYS.items()}
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        of_model["rope.scaling.type"] = "linear"
        of_model["rope.scaling.factor"] = config.rope_scaling.factor
    return metadata | {f"{architecture}.{key}": value for key, value in of_model.items()}


def _sampling(checkpoint: StoredCheckpoint) -> Pairs:
    """Return the recommended sampling, in the types of llama.cpp's converter."""
    stated = checkpoint.sampling.stated
    values: Pairs = {key: stated[name] for key, name in SAMPLING_KEYS.items() if name in stated}
    top_k = "general.sampling.top_k"
    return values | ({top_k: np.int32(values[top_k])} if top_k in values else {})


def _add_metadata(writer: gguf.GGUFWriter, metadata: Pairs) -> None:
    """Skip empty arrays, which gguf cannot write, and arrays of arrays."""
    for key, value in metadata.items():
        if isinstance(value, str):  # a path's name may be invalid UTF-8
            valid = value.encode("utf-8", "replace")
            writer.add_key_value(key, valid, GGUFValueType.STRING)
        elif isinstance(value, list):
            if value and all(isinstance(item, str) for item in value):
                writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.STRING)
        elif (values := np.asarray(value, _OF_PYTHON.get(type(value)))).ndim == 0:
            writer.add_key_value(key, values.item(), _KINDS[values.dtype])
        elif values.size:
            kind = _KINDS[values.dtype]
            writer.add_key_value(key, values.tolist(), GGUFValueType.ARRAY, kind)


FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
_WIDE = (Kind.F32, Kind.BF16)
_LARGEST_FLOAT16 = 65504.0  # also of a block's scale
_EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")
_GGUF_MODEL_NAMES = {hf: gguf for gguf, hf in MODEL_NAMES.items()}
_GGUF_LAYER_NAMES = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufTensor(NamedTuple):
    """A weight as the file will store it."""

    name: str
    source: StoredTensor
    kind: Kind

    @property
    def stored_shape(self) -> tuple[int, ...]:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        *rows, columns = self.source.shape
        return (*rows, columns // block * block_bytes)

    def encode(self) -> np.ndarray:
        """Return uint8 [*stored_shape], unchanged if the source has this type. Raises ExportError
        for values out of range."""
        if self.source.kind == self.kind:
            stored = self.source.stored_rows()
        else:
            values = self.source.float32()
            if self.kind not in _WIDE and np.abs(values).max() > _LARGEST_FLOAT16:
                raise ExportError(
                    f"{self.name} has values that {self.kind.name} cannot hold",
                    remedy="Export with --quant BF16 or F32.",
                )
            with np.errstate(all="ignore"):  # scales too small for float16 become 0
                stored = quants.quantize(values, self.kind)
        return np.ascontiguousarray(stored).view(np.uint8).reshape(self.stored_shape)


def gguf_tensors(checkpoint: StoredCheckpoint, kind: Kind | None) -> Iterator[GgufTensor]:
    """Yield all weights. kind: of matrices (None: unchanged); embedding and head keep 8 bits."""
    config = checkpoint.config
    family = BY_ARCHITECTURE.get(gguf_architecture(config))
    for name in checkpoint.names():
        source = checkpoint.tensors[name]
        if family is not None and family.is_permuted:
            source = turned(name, source, config.head_dim, from_gguf=False)
        stored_as = _kind(name, source, source.kind if kind is None else kind)
        yield GgufTensor(gguf_name(name), source, stored_as)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "linear":
        unscaled = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        factors = scaling.divisors(unscaled).astype(np.float32)
        yield GgufTensor(_ROPE_FACTORS, StoredTensor.of(factors), Kind.F32)


def gguf_name(name: str) -> str:
    """Return GGUF's name of a Hugging Face tensor."""
    if name in _GGUF_MODEL_NAMES:
        return _GGUF_MODEL_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{suffix}"


def _kind(name: str, source: StoredTensor, wanted: Kind) -> Kind:
    if len(source.shape) == 1:
        return Kind.F32  # llama.cpp requires it for norms and biases
    if wanted == source.kind or wanted in FLOATS:
        return wanted
    if name in _EIGHT_BITS:
        wanted = Kind.Q8_0
    if source.shape[-1] % GGML_QUANT_SIZES[wanted][0]:
        return Kind.F16  # llama.cpp does the same with rows of partial blocks
    return wanted


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Pairs,
    tensors: Sequence[GgufTensor],
    progress: Progress,
) -> None:
    """Raises ExportError for a tensor whose values exceed its type."""
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_metadata(writer, metadata)
        for tensor in tensors:
            shape = tensor.stored_shape
            size = int(np.prod(shape))
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), size, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for i, tensor in enumerate(tensors):
            writer.write_tensor_data(tensor.encode())
            progress("Converting the weights", (i + 1) / len(tensors))
    finally:
        writer.close()
