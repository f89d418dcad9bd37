"""Chooses what PyTorch trains on: the first GPU of CUDA where there is one, else the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edge_spec.errors import DeviceMemoryError


@contextmanager
def training_device() -> Iterator[None]:
    """Has PyTorch make its tensors there. Raises DeviceMemoryError where a GPU has too little
    memory."""
    import torch

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
