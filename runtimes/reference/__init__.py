"""Decoders in plain numpy, float32: the oracle that every other runtime is held against."""

from edge_spec.runtimes.reference.model import ReferenceModel, ReferenceRuntime
from edge_spec.runtimes.reference.session import ReferenceSession

__all__ = ["ReferenceModel", "ReferenceRuntime", "ReferenceSession"]
