"""Holds what all kinds of drafters have in common while they are trained, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from edge_spec.core.config import ModelConfig
from edge_spec.core.rope import Rope
from edge_spec.distill.windows import Batch
from edge_spec.errors import DeviceMemoryError

Tensor = Any  # torch.Tensor: the library's types are not there where it is not installed
# What `torch.cpu` calls instructions that multiply bfloat16, of x86 and of ARM.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
DISCOUNT = 0.8  # of each further position in the loss (Li et al. 2025, EAGLE-3)


@dataclass(frozen=True)
class Products:
    """Rounds what is multiplied to `kind`, float32 or bfloat16. Sums of rows, losses and parameters
    stay float32 (Micikevicius et al. 2018, mixed precision)."""

    kind: str = "float32"

    def rounded(self, values: Tensor) -> Tensor:
        """Returns them as they are multiplied. A matrix is made once for all products of a step."""
        return values.to(self._type)

    def of(self, x: Tensor, matrix: Tensor) -> Tensor:
        """[..., outputs]. x: [..., inputs]; matrix: [outputs, inputs], rounded."""
        return torch.nn.functional.linear(self.rounded(x), matrix)

    @property
    def _type(self) -> Any:
        return getattr(torch, self.kind)


FLOAT32 = Products()


def fastest_products() -> Products:
    """bfloat16 where the processor, or the GPU that is trained on, multiplies it by itself: two to
    four times as fast. Elsewhere it would be slower than float32."""
    if torch.get_default_device().type == "cuda":
        return Products("bfloat16" if torch.cuda.is_bf16_supported(False) else "float32")
    told: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_it = any(told.get(name) for name in _BFLOAT16_INSTRUCTIONS)
    return Products("bfloat16" if has_it else "float32")


@contextmanager
def training_device() -> Iterator[None]:
    """Has PyTorch make its tensors there. Raises DeviceMemoryError where a GPU has too little
    memory."""
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
        torch.cuda.empty_cache()  # what follows opens the model there


class Trainee(Protocol):
    """A drafter that learns. Its parameters are float32, by the names that it is stored by."""

    parameters: dict[str, Tensor]
    num_positions: int

    def scores(self, batch: Batch) -> list[Tensor]:
        """Returns by position [anchors, scored tokens] logits after the target's own tokens."""

    def drafts(self, batch: Batch) -> np.ndarray:
        """[anchors, positions] the likeliest tokens, as a greedy chain drafts them after the
        target's own tokens. Called without gradients."""

    def stored(self) -> dict[str, np.ndarray]:
        """The tensors of the drafter's file."""

    def description(self) -> dict[str, Any]:
        """Its config.json."""

    def texts(self) -> Mapping[str, str]:
        """Returns what else is in its directory: name -> content."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """Computes what the target would choose, over the tokens that are scored.

    output: [scored tokens, hidden_size] rows of its output matrix. token_ids: [scored tokens].
    products: how the drafter multiplies as well.
    """

    config: ModelConfig
    output: np.ndarray
    token_ids: np.ndarray
    products: Products = FLOAT32

    @cached_property
    def matrix(self) -> Tensor:
        """The output matrix as it is multiplied."""
        return self.products.rounded(torch.as_tensor(self.output))

    def index_of(self) -> np.ndarray:
        """[vocab_size] int64: where each token is among the scored ones; -1 where it is not."""
        found = np.full(self.config.vocab_size, -1, np.int64)
        found[self.token_ids] = np.arange(len(self.token_ids))
        return found

    def probabilities(self, batch: Batch) -> list[Tensor]:
        """Returns by position [anchors, scored tokens], renormalised over these."""
        wanted, rows = scored_rows(batch)
        logits = self.products.of(torch.as_tensor(batch.states)[wanted], self.matrix).float()
        logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        probabilities = torch.softmax(logits, dim=-1)
        return [probabilities[each] for each in rows]


def scored_rows(batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """[windows, rows + positions] bool, the rows that something is drafted after; and by position
    [anchors] which of these it is."""
    width, anchors = batch.next_tokens.shape[1], torch.as_tensor(batch.anchors)
    wanted = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    places = range(1, batch.written.shape[2] + 1)
    for at in places:
        wanted[:, at : at + width] |= anchors
    index = torch.cumsum(wanted.flatten(), 0).reshape(wanted.shape) - 1
    return wanted, [index[:, at : at + width][anchors] for at in places]


def loss_of(trainee: Trainee, teacher: Teacher, batch: Batch) -> Tensor:
    """Cross entropy to the target's own distribution, which has the gradient of the forward KL
    divergence. Places where the target wrote a token that is not scored say nothing, and neither
    do those after its text."""
    index = np.append(teacher.index_of(), -1)  # -1, no token, is not scored either
    expected = teacher.probabilities(batch)
    total: Tensor = torch.zeros(())
    for position, logits in enumerate(trainee.scores(batch)):
        counts = torch.as_tensor(index[batch.written[batch.anchors][:, position]] >= 0)
        if counts.any():
            weights = counts / counts.sum()
            missed = _cross_entropy(logits, expected[position], weights)
            total = total + DISCOUNT**position * missed
    return total


def _cross_entropy(logits: Tensor, expected: Tensor, weights: Tensor) -> Tensor:
    """Sums rows by their weights. Its gradient, a difference of probabilities, is made here and all
    that is kept: logits have more numbers than anything else of a step."""
    with torch.no_grad():
        likely = torch.log_softmax(logits.float(), dim=-1)
        missed = -(torch.linalg.vecdot(expected, likely) * weights).sum()
        gradient = likely.exp_().sub_(expected).mul_(weights[:, None]).to(logits.dtype)
    slope = torch.dot(logits.flatten(), gradient.flatten())
    return missed + slope - slope.detach()


def drafted(trainee: Trainee, batch: Batch) -> np.ndarray:
    """[anchors, positions] what it drafts from every anchor."""
    with torch.no_grad():
        return trainee.drafts(batch)


def likeliest(scores: Sequence[Tensor], token_ids: np.ndarray) -> np.ndarray:
    """[anchors, positions] the tokens with the largest logits. scores: by position, [anchors,
    scored tokens]; token_ids: [scored tokens]."""
    best = [logits.argmax(dim=-1).cpu().numpy() for logits in scores]
    found: np.ndarray = token_ids[np.stack(best, axis=1)]
    return found


def parameter(values: np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(values, np.float32), requires_grad=True)


def as_arrays(parameters: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Copies."""
    return {name: each.detach().cpu().numpy().copy() for name, each in parameters.items()}


class Rotation:
    """Rotary positions of one model, halves paired (Su et al. 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        rope = Rope(config.rope_theta, config.rope_scaling)
        self._frequencies = torch.as_tensor(rope.frequencies(config.head_dim))
        self._magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [..., rows, head_dim]. positions: [..., rows]."""
        angles = positions[..., None] * self._frequencies
        cos = (angles.cos() * self._magnitude).float()
        sin = (angles.sin() * self._magnitude).float()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DecoderLayers:
    """Layers like Llama's for one batch: each matrix is rounded once, whatever it multiplies."""

    def __init__(
        self, teacher: Teacher, parameters: Mapping[str, Tensor], rotation: Rotation
    ) -> None:
        self._config, self._products = teacher.config, teacher.products
        self._parameters, self._rotation = parameters, rotation
        self._matrices = {
            name: self._products.rounded(each)
            for name, each in parameters.items()
            if each.dim() == 2
        }

    def linear(self, x: Tensor, name: str) -> Tensor:
        made, bias = self._products.of(x, self._matrices[name + ".weight"]), name + ".bias"
        return made + self._parameters[bias] if bias in self._parameters else made

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Divides the last axis by its root mean square (Zhang & Sennrich 2019, RMSNorm)."""
        scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + self._config.norm_epsilon)
        return x * scale * self._parameters[name + ".weight"]

    def heads(self, read: Tensor, layer: str, name: str, positions: Tensor) -> Tensor:
        """[windows, heads, rows, head_dim], every query head with its own keys and values. name: q,
        k or v. positions: [windows, 1, rows] or [rows]."""
        config = self._config
        made = self.linear(read, f"{layer}.self_attn.{name}_proj")
        made = made.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        if config.qk_norm and name != "v":
            made = self.normed(made, f"{layer}.self_attn.{name}_norm")
        if name != "v":
            made = self._rotation.turned(made, positions)
        made = self._products.rounded(made)
        return made.repeat_interleave(config.num_heads // made.shape[1], dim=1)

    def after_attention(self, stream: Tensor, mixed: Tensor, layer: str) -> Tensor:
        """mixed: [windows, rows, query heads * head_dim] of the values that were attended to."""
        stream = stream + self.linear(mixed, f"{layer}.self_attn.o_proj")
        inner = self.normed(stream, f"{layer}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(inner, f"{layer}.mlp.gate_proj"))
        up = self.linear(inner, f"{layer}.mlp.up_proj")
        return stream + self.linear(gate * up, f"{layer}.mlp.down_proj")
