"""Sessions of encoder-decoders: a graph reads the source, another one writes the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import onnxruntime

from edge_spec.core.config import ModelConfig
from edge_spec.core.source_session import DecoderSession, SourceSession
from edge_spec.runtimes.ort.pass_errors import pass_error

# From a source to keys and values, by the names of the decoder's inputs.
Encode = Callable[[Sequence[int]], Mapping[str, np.ndarray]]


def encode(
    inference: onnxruntime.InferenceSession, source: Sequence[int]
) -> Mapping[str, np.ndarray]:
    """inference: of exporters/onnx/encoder.py. Raises SessionError, DeviceMemoryError."""
    names = [value.name for value in inference.get_outputs()]
    try:
        found = inference.run(names, {"input_ids": np.array([source], np.int64)})
    except Exception as error:
        raise pass_error(error, len(source), 0) from error
    return dict(zip(names, found, strict=True))


class InterruptibleDecoder(DecoderSession, Protocol):
    def interrupt(self) -> None: ...


class OrtSourceSession(SourceSession):
    """One whose passes can be ended, as those of its decoder can."""

    def __init__(self, decoder: InterruptibleDecoder, config: ModelConfig) -> None:
        assert config.encoder is not None
        super().__init__(decoder, config.encoder, config.context_length)
        self._interruptible = decoder

    def interrupt(self) -> None:
        self._interruptible.interrupt()
