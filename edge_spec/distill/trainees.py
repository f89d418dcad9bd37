"""Drafters in training, in PyTorch: Medusa heads (Cai et al. 2024, Medusa-1) and an EAGLE-3 head
(Li et al. 2025). Each computes states, which an output matrix scores."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import TensorRows
from edge_spec.core.rope import Rope
from edge_spec.distill.features import Batch
from edge_spec.distill.request import DistillRequest
from edge_spec.errors import DeviceMemoryError
from edge_spec.loader.head import StoredTables
from edge_spec.storage.atomic import as_storage_error

Tensor = Any  # torch.Tensor; PyTorch's types are missing where it is not installed
# Names in `torch.cpu` of x86's and ARM's instructions that multiply bfloat16.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
DISCOUNT = 0.8  # per further position in the loss (Li et al. 2025, EAGLE-3)


def multiplies_bfloat16() -> bool:
    """Return True if bfloat16 products are native: 2 to 4 times as fast as float32."""
    if torch.get_default_device().type == "cuda":
        return bool(torch.cuda.is_bf16_supported(False))
    told: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(told.get(name) for name in _BFLOAT16_INSTRUCTIONS)


def fast_products() -> Any:
    """In the block, round only the factors of products to bfloat16, if that is faster (Micikevicius
    et al. 2018, mixed precision)."""
    device = torch.get_default_device().type
    return torch.autocast(device, torch.bfloat16, enabled=multiplies_bfloat16())


@contextmanager
def training_device() -> Iterator[None]:
    """Create tensors on the GPU, if any. Raises DeviceMemoryError."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        with device:
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{torch.cuda.get_device_name(device)} has too little memory for this training",
            remedy="Set CUDA_VISIBLE_DEVICES to nothing: it is then done on the CPU.",
        ) from error
    finally:
        torch.cuda.empty_cache()  # the model is opened there next


class Trainee(ABC):
    """A drafter in training. parameters: float32, by their names on disk."""

    parameters: dict[str, Tensor]
    num_positions: int
    _teacher: Teacher

    @abstractmethod
    def states(self, batch: Batch) -> list[Tensor]:
        """Return states by position, [anchors, hidden_size], after the target's own tokens."""

    @property
    def matrix(self) -> Tensor:
        """[scored tokens, hidden_size], for scoring states."""
        return self._teacher.matrix

    @abstractmethod
    def drafter(self) -> Drafter:
        """Return the drafter in its current state."""

    def scores(self, batch: Batch) -> list[Tensor]:
        """Return logits by position, [anchors, scored tokens]."""
        scores: list[Tensor] = list(
            functional.linear(torch.stack(self.states(batch)), self.matrix).unbind()
        )
        return scores

    def drafts(self, batch: Batch) -> np.ndarray:
        """Return a greedy chain, [anchors, positions], after the target's own tokens. Call without
        gradients."""
        best = [logits.argmax(dim=-1).cpu().numpy() for logits in self.scores(batch)]
        found: np.ndarray = self._teacher.token_ids[np.stack(best, axis=1)]
        return found


def make_trainee(teacher: Teacher, source: TensorRows, request: DistillRequest) -> Trainee:
    """source: with all weights for a kind that starts as a layer of its target."""
    if request.kind == "medusa":
        return MedusaTrainee(teacher, request.positions)
    return Eagle3Trainee(teacher, source, request.positions, request.seed)


@dataclass(frozen=True, eq=False)
class Teacher:
    """The target's distribution over scored tokens. output: [scored tokens, hidden_size] rows of
    its output matrix. token_ids: [scored tokens]."""

    config: ModelConfig
    output: np.ndarray
    token_ids: np.ndarray

    @cached_property
    def matrix(self) -> Tensor:
        return torch.as_tensor(self.output)

    def probabilities(self, batch: Batch) -> list[Tensor]:
        """Return probabilities by position, [anchors, scored tokens], renormalized."""
        wanted, rows = _drafted_rows(batch)
        logits = functional.linear(torch.as_tensor(batch.states)[wanted], self.matrix).float()
        logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        probabilities = torch.softmax(logits, dim=-1)
        return [probabilities[each] for each in rows]


def _drafted_rows(batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Return the rows from which draft tokens are predicted, [windows, rows + positions] bool; and
    by position their indices, [anchors]."""
    width, anchors = batch.next_tokens.shape[1], torch.as_tensor(batch.anchors)
    wanted = torch.zeros(batch.states.shape[:2], dtype=torch.bool)
    places = range(1, batch.written.shape[2] + 1)
    for at in places:
        wanted[:, at : at + width] |= anchors
    index = torch.cumsum(wanted.flatten(), 0).reshape(wanted.shape) - 1
    return wanted, [index[:, at : at + width][anchors] for at in places]


def loss_of(trainee: Trainee, teacher: Teacher, batch: Batch) -> Tensor:
    """Return the cross entropy to the target's distribution where the target wrote a scored token;
    its gradient is the forward KL divergence's."""
    is_scored = np.zeros(teacher.config.vocab_size + 1, bool)  # -1, no token, is not scored either
    is_scored[teacher.token_ids] = True
    expected = teacher.probabilities(batch)
    total: Tensor = torch.zeros(())
    for position, logits in enumerate(trainee.scores(batch)):
        counts = torch.as_tensor(is_scored[batch.written[batch.anchors][:, position]])
        if counts.any():
            missed = functional.cross_entropy(logits.float(), expected[position], reduction="none")
            total = total + DISCOUNT**position * torch.dot(missed, counts / counts.sum())
    return total


def parameter(values: np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(values, np.float32), requires_grad=True)


def as_arrays(parameters: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: each.detach().cpu().numpy().copy() for name, each in parameters.items()}


class MedusaTrainee(Trainee):
    """Head k is z + SiLU(A z + b), initially the target's own choice, with the target's output
    matrix."""

    def __init__(self, teacher: Teacher, num_heads: int) -> None:
        hidden = teacher.config.hidden_size
        self.num_positions = num_heads
        self.parameters: dict[str, Tensor] = {}
        self._teacher = teacher
        for head in range(num_heads):
            prefix = f"{head}.0.linear."
            self.parameters[prefix + "weight"] = parameter(np.zeros((hidden, hidden)))
            self.parameters[prefix + "bias"] = parameter(np.zeros(hidden))

    def states(self, batch: Batch) -> list[Tensor]:
        width, anchors = batch.next_tokens.shape[1], torch.as_tensor(batch.anchors)
        given = torch.as_tensor(batch.states)[:, :width][anchors]
        return [self._head(given, head) for head in range(self.num_positions)]

    def drafter(self) -> Drafter:
        ids, target = self._teacher.token_ids, self._teacher.config
        tensors = {
            **as_arrays(self.parameters),
            "lm_head.weight": self._teacher.output,
            "d2t": ids - np.arange(len(ids)),
        }
        config = {
            "medusa_num_heads": self.num_positions,
            "medusa_num_layers": 1,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }
        return Drafter(tensors, config)

    def _head(self, states: Tensor, head: int) -> Tensor:
        weight, bias = (self.parameters[f"{head}.0.linear.{name}"] for name in ("weight", "bias"))
        return states + functional.silu(functional.linear(states, weight, bias))


_SPREAD = 0.02  # of random initial values
_FEATURES = 3


class Eagle3Trainee(Trainee):
    """One decoder layer over the inputs of three target layers, each normed first as in EAGLE-3.1,
    which takes fewer steps.

    It starts as the target's last layer over the last feature, with the target's output matrix. It
    trains as it drafts: after the first position it reads its own last state instead of features,
    with the tokens that the target wrote (training-time test, section 3.2).
    """

    def __init__(
        self, teacher: Teacher, source: TensorRows, num_positions: int, seed: int = 0
    ) -> None:
        self.num_positions = num_positions
        self.parameters = _eagle3_beginning(teacher, source, np.random.default_rng(seed))
        self._teacher = teacher
        self._tables = StoredTables(source)
        # Trained as it will be loaded: without a scaling that config.json cannot express.
        scaled = rope_scaling_config(teacher.config) is not None
        scaling = teacher.config.rope_scaling if scaled else None
        self._rope = Rope(teacher.config.rope_theta, scaling)

    @property
    def matrix(self) -> Tensor:
        return self.parameters["lm_head.weight"]

    def states(self, batch: Batch) -> list[Tensor]:
        """Rows before the first anchor only provide keys and values."""
        rows, is_anchor = _anchor_rows(batch)
        features = self._joined(torch.as_tensor(batch.features))
        read = self._read(batch.next_tokens, features)
        places = torch.arange(read.shape[1]).expand(len(read), -1)
        keys, values = (self._heads(read, name, places) for name in "kv")
        is_before = places[:, None, :] <= rows[:, :, None]
        sees = (is_before & torch.as_tensor(batch.is_row)[:, None, :])[:, None]
        stream, read = _of_rows(features, rows), _of_rows(read, rows)
        own: list[tuple[Tensor, Tensor]] = []  # keys and values, by further position
        states = []
        for position in range(self.num_positions):
            at = rows + position
            if position:
                written = batch.written[:, :, position - 1]
                tokens = np.take_along_axis(written, rows.cpu().numpy(), axis=1)
                read = self._read(tokens, stream)
                own.append((self._heads(read, "k", at), self._heads(read, "v", at)))
            mixed = _attend(self._heads(read, "q", at), (keys, values), sees, own)
            stream = self._after_attention(stream, mixed)
            states.append(self._normed(stream[is_anchor], "norm"))
        return states

    def drafter(self) -> Drafter:
        ids, target = self._teacher.token_ids, self._teacher.config
        tensors = {
            **as_arrays(self.parameters),
            "d2t": ids - np.arange(len(ids)),
            "t2d": np.isin(np.arange(target.vocab_size), ids),
        }
        own = {"draft_vocab_size": len(ids), "fc_norm": True}
        return Drafter(tensors, layer_config(target) | own)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.parameters[name + ".weight"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm of the last axis (Zhang & Sennrich 2019)."""
        epsilon = self._teacher.config.norm_epsilon
        scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + epsilon)
        return x * scale * self.parameters[name + ".weight"]

    def _joined(self, features: Tensor) -> Tensor:
        """[windows, rows, layers, hidden_size] -> [windows, rows, hidden_size]. Normed, since
        features grow with depth, and are much larger for a text's first token."""
        each = [self._normed(features[:, :, at], f"fc_norm.{at}") for at in range(_FEATURES)]
        return self._linear(torch.cat(each, dim=-1), "fc")

    def _read(self, tokens: np.ndarray, stream: Tensor) -> Tensor:
        """Return the attention's input: tokens with features or states. -1 is no token; what
        follows it is not learned."""
        ids, places = np.unique(np.maximum(tokens, 0), return_inverse=True)
        embedded = torch.as_tensor(self._tables.embed(ids))
        token = embedded[torch.as_tensor(places.reshape(tokens.shape))]
        token = self._normed(token, "midlayer.input_layernorm")
        return torch.cat([token, self._normed(stream, "midlayer.hidden_norm")], dim=-1)

    def _heads(self, read: Tensor, name: str, positions: Tensor) -> Tensor:
        """Return [windows, heads, rows, head_dim]; each query head has its own keys and values.
        name: q, k or v. positions: [windows, rows]."""
        config = self._teacher.config
        made = self._linear(read, f"midlayer.self_attn.{name}_proj").float()
        made = made.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        if name != "v":  # halves paired (Su et al. 2021)
            tables = self._rope.tables(int(positions.max()) + 1, config.head_dim)
            cos, sin = (torch.as_tensor(each)[positions][:, None] for each in tables)
            first, second = made.chunk(2, dim=-1)
            made = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return made.repeat_interleave(config.num_heads // made.shape[1], dim=1)

    def _after_attention(self, stream: Tensor, mixed: Tensor) -> Tensor:
        """mixed: [windows, rows, query heads * head_dim]."""
        stream = stream + self._linear(mixed, "midlayer.self_attn.o_proj")
        inner = self._normed(stream, "midlayer.post_attention_layernorm")
        gate = functional.silu(self._linear(inner, "midlayer.mlp.gate_proj"))
        up = self._linear(inner, "midlayer.mlp.up_proj")
        return stream + self._linear(gate * up, "midlayer.mlp.down_proj")


def _anchor_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each window's anchor rows, [windows, most anchors] int64; and a mask of those that are
    no padding, which repeats the last row. A window's anchors are its last rows."""
    counts = batch.anchors.sum(axis=1, keepdims=True)
    places = np.arange(counts.max())
    last = batch.anchors.shape[1] - 1
    rows = np.minimum(batch.anchors.argmax(axis=1)[:, None] + places, last)
    return torch.as_tensor(rows), torch.as_tensor(places < counts)


def _of_rows(made: Tensor, rows: Tensor) -> Tensor:
    return made.gather(1, rows[:, :, None].expand(-1, -1, made.shape[2]))


def _attend(
    queries: Tensor,
    of_text: tuple[Tensor, Tensor],
    sees: Tensor,
    own: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Return [windows, most anchors, query heads * head_dim]. Anchors attend to the first position
    up to their row, `of_text`, and to their own row at further positions."""
    keys, values = of_text
    scores = (queries @ keys.transpose(-1, -2)).float().masked_fill(~sees, -torch.inf)
    beside = [(queries * each).sum(-1, keepdim=True) for each, _ in own]
    scaled = torch.cat([scores, *beside], dim=-1) * queries.shape[-1] ** -0.5
    weights = torch.softmax(scaled, dim=-1)
    width = keys.shape[2]
    mixed = weights[..., :width] @ values
    for at, (_, each) in enumerate(own):
        mixed = mixed + weights[..., width + at, None] * each
    return mixed.transpose(1, 2).flatten(start_dim=2)


def _eagle3_beginning(
    teacher: Teacher, source: TensorRows, random: np.random.Generator
) -> dict[str, Tensor]:
    config, hidden = teacher.config, teacher.config.hidden_size
    late = f"model.layers.{config.num_layers - 1}."
    small = random.standard_normal((hidden, _FEATURES * hidden)) * _SPREAD * hidden**-0.5
    small[:, 2 * hidden :] += np.eye(hidden)
    made = {
        "fc": small,
        "midlayer.input_layernorm": np.ones(hidden),
        "midlayer.hidden_norm": source.float32(late + "input_layernorm.weight"),
        "norm": source.float32("model.norm.weight"),
        "lm_head": teacher.output,
        **{f"fc_norm.{at}": np.ones(hidden) for at in range(_FEATURES)},
    }
    for name in ("post_attention_layernorm", "self_attn.o_proj", *_MLP):
        made["midlayer." + name] = source.float32(f"{late}{name}.weight")
    for name in "qkv":
        matrix = source.float32(f"{late}self_attn.{name}_proj.weight")
        beside = random.standard_normal(matrix.shape) * _SPREAD
        made[f"midlayer.self_attn.{name}_proj"] = np.concatenate([beside, matrix], axis=1)
    return {name + ".weight": parameter(each) for name, each in made.items()}


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


# A trained drafter on disk, as other libraries read it: safetensors and config.json.
_TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class Drafter:
    """A drafter's files. config: config.json."""

    tensors: Mapping[str, np.ndarray]
    config: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write float32 as float16 where it fits. Raises StorageError if the disk is full,
        OSError."""
        tensors = {name: _to_half(values) for name, values in self.tensors.items()}
        _write_safetensors(directory / "model.safetensors", tensors)
        config = json.dumps(self.config, indent=2)
        (directory / "config.json").write_text(config, encoding="utf-8")


def _to_half(values: np.ndarray) -> np.ndarray:
    fits = values.dtype == np.float32 and np.abs(values).max(initial=0) < _LARGEST_HALF
    return values.astype(np.float16) if fits else values


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    entries, end = {}, 0
    for name, each in tensors.items():
        begin, end = end, end + each.nbytes
        kind = _TYPES[each.dtype.name]
        entries[name] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with as_storage_error(path), path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for each in tensors.values():
            file.write(each.astype(each.dtype.newbyteorder("<")).tobytes())


def layer_config(config: ModelConfig) -> dict[str, Any]:
    """Return config.json for a layer of the target's shape."""
    written: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
    }
    scaling = rope_scaling_config(config)
    return written if scaling is None else {**written, "rope_scaling": scaling}


def rope_scaling_config(config: ModelConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json; None if there is none, or none that it can express."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "factors":  # listed one by one, as in GGUF files
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }
