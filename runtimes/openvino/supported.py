"""Refuses models that OpenVINO is not given, by their headers."""

from __future__ import annotations

from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.errors import UnsupportedModelError


def require_supported(config: ModelConfig, path: Path) -> None:
    """Raises UnsupportedModelError."""
    lacked = config.unlike_layers
    if config.encoder is not None:
        lacked = "an encoder"
    elif config.convolving:
        lacked = "short convolutions"
    if lacked is not None:
        raise UnsupportedModelError(
            f"{path} has {lacked}, which openvino is not given", remedy="Choose --runtime ort."
        )
