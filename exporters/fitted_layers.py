"""Makes the matrices of a model's layers into blocks of integers, a layer at a time.

What an error in a weight costs is the mean square of its inputs: the squared error of a layer's
output, summed over texts, is that of its weights with these as factors, where inputs are
uncorrelated (Lin et al. 2024, AWQ, keep the same inputs' weights exact; Kim et al. 2024,
SqueezeLLM, weigh by the gradient instead).

What a file has in this form is carried over, and 8 bits are near enough to the source (0.003 nats a
token on the demo model) to be rounded as they are. Other matrices are fitted to what each is
multiplied with once all before it are in blocks: two streams of our own prompts pass the layers,
one with the model's weights and one with what is made of them.

Weights also make up for what the matrices before them have done to their inputs. In a quantized
model a matrix gets other inputs than in its source: X instead of E. Of all weights those nearest to
the source's outputs E W^T are W E^T X (X^T X)^-1 (least squares; Frantar et al. 2022, GPTQ, and Li
et al. 2025, GPTAQ, correct in the same direction as they round). A part of the way is best where X
is a sample of few texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import LayerStream
from edge_spec.core.model import Progress
from edge_spec.exporters.block_quantize import BlockQuantized, is_carried, quantize_stored
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.models import runtimes
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts
from edge_spec.text.tokenizer import Tokenizer

_PROMPTS_PER_CATEGORY = 6
_MEASURED_PER_PROMPT = 32

_FLOOR = 1e-3  # of the mean: an input that was zero in these texts counts a little


def input_importance(checkpoint: StoredCheckpoint, progress: Progress) -> Mapping[str, np.ndarray]:
    """Returns an array [in] for each matrix, measured by the reference on the beginnings of our own
    prompts; none for an embedding that is no head."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json())
    tokens: list[int] = []
    for prompt in read_prompts(OWN_PROMPTS, _PROMPTS_PER_CATEGORY):
        tokens += tokenizer.encode(prompt.text + "\n")[:_MEASURED_PER_PROMPT]
    tokens = tokens[: checkpoint.config.context_length]
    found: dict[str, np.ndarray] = {}

    def observe(name: str, inputs: np.ndarray) -> None:
        found[name] = importance(inputs)

    stream = runtimes.load_layer_stream(checkpoint, [tokens], observe)
    num_layers = checkpoint.config.num_layers
    for layer in range(num_layers):
        stream.advance()
        progress("Measuring what weights are multiplied with", (layer + 1) / num_layers)
    stream.logits(np.arange(len(tokens)))
    return found


def importance(inputs: np.ndarray) -> np.ndarray:
    """Returns [in] float64, all alike where inputs are zero or no numbers; inputs: [rows, in]."""
    squares = np.square(inputs, dtype=np.float64).mean(axis=0)
    floored: np.ndarray = squares + _FLOOR * squares.mean()
    return floored if np.isfinite(floored).all() and floored.any() else np.ones(len(floored))


_TOKENS_PER_PROMPT = 128


def calibration_sequences(checkpoint: StoredCheckpoint, max_tokens: int) -> list[list[int]]:
    """Returns the beginnings of prompts of all categories, at most `max_tokens` in all and each
    within the model's context; none where the tokenizer makes nothing of them."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json())
    longest = min(_TOKENS_PER_PROMPT, checkpoint.config.context_length)
    by_category: dict[str, list[str]] = {}
    for prompt in read_prompts(OWN_PROMPTS):
        by_category.setdefault(prompt.category, []).append(prompt.text)
    found: list[list[int]] = []
    for texts in zip(*by_category.values(), strict=True):
        for text in texts:
            tokens = tokenizer.encode(text + "\n")[: min(longest, max_tokens)]
            max_tokens -= len(tokens)
            found += [tokens] if tokens else []
    return found


_DAMPING = 0.2  # of the mean square of the inputs
_PART = 0.5  # of the way: on the demo model the best of 0, a half and 1


def input_correction(inputs: np.ndarray, exact: np.ndarray) -> np.ndarray | None:
    """Returns the matrix [columns, columns] float32 that weights [rows, columns] are multiplied
    with; None where the inputs are no numbers or zero.

    inputs, exact: [tokens, columns], those that the weights get and those that they were made for.
    """
    hessian = inputs.T @ inputs
    drift = exact.T @ inputs - hessian
    scale = np.float32(np.trace(hessian) / len(hessian))
    if not (np.isfinite(scale) and scale > 0 and np.isfinite(drift).all()):
        return None
    hessian /= scale
    drift /= scale
    diagonal = np.diag_indices_from(hessian)
    hessian[diagonal] += np.float32(_DAMPING)
    found: np.ndarray = np.linalg.solve(hessian, np.float32(_PART) * drift.T).T
    found[diagonal] += 1
    return found


# Which matrices of a layer share their inputs and are stored as one.
_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("conv.in_proj",),
    ("conv.out_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
    ("per_layer_input_gate",),
    ("per_layer_projection",),
)
_OF_ALL_LAYERS = "model.per_layer_model_projection.weight"  # made before the first one, in 8 bits
# Parameters times tokens: a stream of so many passes the model in about ten seconds on two cores.
_MAX_WORK = 4e11
_MIN_TOKENS, _MAX_TOKENS = 128, 2048


class FittedLayers:
    """Reads a checkpoint as the weights that it has once they are in blocks."""

    def __init__(self, checkpoint: StoredCheckpoint, bits: int, block_size: int) -> None:
        self.config: ModelConfig = checkpoint.config
        self._checkpoint = checkpoint
        self._bits = bits
        self._block_size = block_size
        self._streams: list[LayerStream] = []
        # Of one layer: what each matrix gets, and would get with the model's own weights.
        self._inputs: dict[str, np.ndarray] = {}
        self._exact: dict[str, np.ndarray] = {}
        self._made: dict[str, BlockQuantized] = {}  # by the first names of groups

    def take(self, names: Sequence[str]) -> BlockQuantized:
        """The matrices of one group, above each other; each group is asked for once, in order."""
        bits = 8 if names[0] == _OF_ALL_LAYERS else self._bits
        if bits == 8 or self._is_carried(names) or not self._texts:
            return quantize_stored(self._stored(names), bits, self._block_size)
        while names[0] not in self._made:
            self._advance()
        return self._made.pop(names[0])

    def names(self) -> Iterator[str]:
        return self._checkpoint.names()

    def float32(self, name: str) -> np.ndarray:
        group = self._group(name)
        if not group or self._is_carried(group):
            return self._checkpoint.float32(name)
        if group[0] not in self._made:
            self._made[group[0]] = self._fit(group, name)
        found = self._made[group[0]]
        before = self._stored(group[: group.index(name)])
        start = sum(tensor.shape[0] for tensor in before)
        rows = slice(start, start + self._checkpoint.tensors[name].shape[0])
        return found.rows(rows).dequantize()

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self._checkpoint.float32_rows(name, rows)

    def _advance(self) -> None:
        if not self._streams:
            self._streams = self._opened()
        for stream in self._streams:
            stream.advance()
        self._exact.clear()
        self._inputs.clear()

    def _opened(self) -> list[LayerStream]:
        """The stream with the model's weights goes ahead, where it can tell anything."""
        config, texts = self.config, self._texts
        streams = [runtimes.load_layer_stream(self, texts, self._inputs.__setitem__)]
        if min(config.hidden_size, config.query_size) <= sum(map(len, texts)):
            source = self._checkpoint
            streams.insert(0, runtimes.load_layer_stream(source, texts, self._exact.__setitem__))
        return streams

    @cached_property
    def _texts(self) -> list[list[int]]:
        if self.config.encoder is not None:  # a stream of layers has no source
            return []
        max_tokens = int(_MAX_WORK / self.config.num_parameters)
        max_tokens = min(max(max_tokens, _MIN_TOKENS), _MAX_TOKENS)
        return calibration_sequences(self._checkpoint, max_tokens)

    def _fit(self, group: Sequence[str], name: str) -> BlockQuantized:
        """name: the first of the group that was multiplied; all have the same inputs."""
        inputs, exact = self._inputs[name], self._exact.get(name)
        correction = None
        if exact is not None and len(inputs) >= inputs.shape[1]:
            correction = input_correction(inputs, exact)
        return quantize_stored(
            self._stored(group), self._bits, self._block_size, importance(inputs), correction
        )

    def _group(self, name: str) -> list[str]:
        """The matrices of the one's group that a model has; none for what is no matrix of a
        layer."""
        for group in _GROUPS:
            for suffix in group:
                if name.endswith(f".{suffix}.weight"):
                    prefix = name.removesuffix(f"{suffix}.weight")
                    names = (f"{prefix}{each}.weight" for each in group)
                    return [each for each in names if each in self._checkpoint.tensors]
        return []

    def _is_carried(self, names: Sequence[str]) -> bool:
        return is_carried(self._stored(names), self._bits, self._block_size)

    def _stored(self, names: Sequence[str]) -> list[StoredTensor]:
        return [self._checkpoint.tensors[name] for name in names]
