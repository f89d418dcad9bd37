"""Decoders in plain numpy, float32: the oracle that every other runtime is held against."""

from edge_spec.runtimes.reference.model import ReferenceModel, ReferenceRuntime, ReferenceSession

__all__ = ["ReferenceModel", "ReferenceRuntime", "ReferenceSession"]
