"""The files that exporters write of tiny checkpoints: their SHA-256, or that they were refused.

Formats that round each weight by itself are the same bytes on every processor. Weights that are
fitted to what they are multiplied with depend on the order of sums, so of these the graph counts
and the sizes, not the bytes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coremltools.converters.mil import Builder
from coremltools.proto import Model_pb2

from edge_spec.core.export import ExportOptions
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.runtimes import load_exporter
from fixtures import families, tiny_models

# Of every family; `compute` is the unit that Core ML's graph is laid out for.
OF_FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("onnx", "fp32", None),
    ("gguf", "F16", None),
    ("gguf", "Q8_0", None),
    ("coreml", "fp16", "gpu"),
    ("onnx-static", "fp32", None),
)
# Of one plain model.
OF_ONE: tuple[tuple[str, str, str | None], ...] = (
    ("onnx", "fp16", None),
    ("onnx", "int8", None),
    ("gguf", "Q4_0", None),
    ("gguf", "Q4_1", None),
    ("gguf", "F32", None),
    ("coreml", "fp16", "ane"),
    ("onnx-static", "fp16", None),
    ("onnx-static", "int8", None),
)
FITTED: tuple[tuple[str, str, str | None], ...] = (
    ("onnx", "int4", None),
    ("coreml", "int4", "gpu"),
    ("coreml", "lut6", "ane"),
    ("onnx-static", "int4", None),
)
QUICK = ("gemma3", "lfm2", "qwen3moe", "t5")  # families of the default suite


def record(names: tuple[str, ...] = families.NAMES) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found: dict[str, Any] = {
            name: dict(_exports(families.write_hf(name, root / name), root, OF_FAMILIES))
            for name in names
        }
        for variant in tiny_models.VARIANTS:
            tiny = tiny_models.write_hf(tiny_models.build(variant), root / "tiny" / variant)
            found[f"tiny {variant}"] = dict(_exports(tiny, root, OF_FAMILIES))
        tiny = tiny_models.write_hf(tiny_models.build("llama"), root / "tiny" / "plain")
        found["rounded"] = dict(_exports(tiny, root, OF_ONE))
        found["fitted"] = dict(_exports(tiny, root, FITTED, is_fitted=True))
    return found


def _exports(
    source: Path,
    root: Path,
    formats: tuple[tuple[str, str, str | None], ...],
    *,
    is_fitted: bool = False,
) -> Iterator[tuple[str, Any]]:
    for number, (form, quantization, compute) in enumerate(formats):
        key = " ".join(filter(None, (form, quantization, compute)))
        out = root / f"{source.name}-{number}" / ("x.gguf" if form == "gguf" else "bundle")
        out.parent.mkdir(exist_ok=True)
        context = 64 if form in ("coreml", "onnx-static") else None
        options = ExportOptions(quantization, compute=compute, context_length=context, check=False)
        Builder.name_count.clear()  # of all Core ML programs that this process built before
        try:
            load_exporter(form).export(open_checkpoint(source), out, options, _quiet)
        except EdgeSpecError as error:
            yield key, type(error).__name__
            continue
        files = sorted(path for path in (out, *out.rglob("*")) if path.is_file())
        yield key, {_name(path, out): _told(path, is_fitted) for path in files}


def _name(path: Path, out: Path) -> str:
    return path.name if path == out else path.relative_to(out).as_posix()


def _told(path: Path, is_fitted: bool) -> Any:
    if path.name == "manifest.json":  # of which the version of the package is left out
        content = json.loads(path.read_text(encoding="utf-8"))
        for varying in ("created_by", "source", "source_sha256", "files", "sha256"):
            content.pop(varying, None)
        return content
    if path.name == "Manifest.json":  # of random names
        return None
    if is_fitted:
        return path.stat().st_size
    content = path.read_bytes()
    if path.suffix == ".mlmodel":  # has maps, which protobuf writes in any order
        model = Model_pb2.Model.FromString(content)
        content = model.SerializeToString(deterministic=True)
    return hashlib.sha256(content).hexdigest()


def _quiet(what: str, fraction: float) -> None:
    pass
