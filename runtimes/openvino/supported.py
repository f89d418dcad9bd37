"""What OpenVINO is not given of models, known from their headers."""

from __future__ import annotations

from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.errors import UnsupportedModelError


def require_supported(config: ModelConfig, path: Path) -> None:
    """Raises UnsupportedModelError."""
    lacked = {
        "an encoder": config.encoder is not None,
        "short convolutions": bool(config.convolving),
        config.unlike_layers: config.unlike_layers is not None,
    }
    for what, is_there in lacked.items():
        if is_there:
            raise UnsupportedModelError(
                f"{path} has {what}, which openvino is not given",
                remedy="Choose --runtime ort.",
            )
