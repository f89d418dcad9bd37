"""Pickled weights of a head, as PyTorch stored them, as safetensors. A pickle may run anything when
it is read, so PyTorch reads this one with `weights_only`: tensors, and no call of what it names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from typing import Any

from edge_spec.distill.tensor_file import Raw, write_raw
from edge_spec.errors import MissingDependencyError, ModelFileError, UsageError
from edge_spec.models import runtimes
from edge_spec.storage.atomic import as_storage_error, atomic_directory

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_USUAL = ("pytorch_model", "medusa_lm_head")  # how files with weights begin
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "bool": "BOOL"}
_READER = "WeightsUnpickler error:"  # before what it has met
_SHOWN = 200  # characters of what a library says


def convert_pickled(path: Path, out: Path) -> int:
    """Writes a head's config.json and its tensors to the directory `out`; returns how many tensors
    there are. Raises UsageError for what is no head with pickled weights, or an `out` that exists,
    ModelFileError for a pickle with anything but tensors, MissingDependencyError without PyTorch,
    StorageError, OSError."""
    files = _pickles(path)
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already", remedy="Remove it, or give another OUT.")
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "pickled weights are read by PyTorch, which is not installed",
            remedy='Run: pip install "edge-spec[distill]".',
        )
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= _read(file)
    with atomic_directory(out) as made, as_storage_error(out):
        write_raw(made / _WEIGHTS, {name: _raw(each) for name, each in tensors.items()})
        copyfile(path / _CONFIG, made / _CONFIG)
    return len(tensors)


def _pickles(path: Path) -> list[Path]:
    if not path.is_dir() or not runtimes.is_head(path):
        raise UsageError(
            f"{path} is no directory of a trained head",
            remedy="Only weights of heads are converted to safetensors.",
        )
    found = sorted(each for each in path.iterdir() if each.suffix in _PICKLED and each.is_file())
    if not found:
        raise UsageError(f"{path} has no pickled weights", remedy="Use it as it is: --draft.")
    # Beside them may lie what a training has left.
    return [each for each in found if each.name.startswith(_USUAL)] or found


def _read(file: Path) -> Mapping[str, Any]:
    """Its tensors, on the CPU. Raises ModelFileError."""
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # it raises whatever its own reader does for a damaged file
        raise ModelFileError(
            f"{file} holds something else than tensors, or is damaged, and nothing of it was run: "
            f"{_reason(error)}",
            remedy="Do not use this head.",
        ) from None
    if not isinstance(found, dict) or not found:
        raise ModelFileError(f"{file} has no tensors by name", remedy="Do not use this head.")
    for name, tensor in found.items():
        kind = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or kind not in _KINDS:
            raise ModelFileError(
                f"{file}: {str(name)[:_SHOWN]} is a {kind[:_SHOWN]}, which no head has",
                remedy="Do not use this head.",
            )
    return found


def _reason(error: Exception) -> str:
    """Returns what PyTorch's reader met, without its advice, which is to run the pickle after
    all."""
    told = " ".join(str(error).split()).partition(" Check the documentation")[0]
    before, _, met = told.rpartition(_READER)
    found = met.strip().split(". ")[0] if before else told.rpartition(". ")[2]
    return found.rstrip(".")[:_SHOWN] or type(error).__name__


def _raw(tensor: Any) -> Raw:
    import torch

    def read() -> bytes:
        found: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return found

    size = math.prod(tensor.shape) * tensor.element_size()
    return Raw(_KINDS[str(tensor.dtype).removeprefix("torch.")], tensor.shape, size, read)
