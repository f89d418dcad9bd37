"""Plain numpy decoders in float32: the reference for every other runtime."""

from edge_spec.runtimes.reference.model import ReferenceModel, ReferenceRuntime, ReferenceSession

__all__ = ["ReferenceModel", "ReferenceRuntime", "ReferenceSession"]
