"""`edge-spec verify`: whether speculation changes what a model writes, on this machine."""

from edge_spec.diagnostics.lossless_check.prove import Extent, Proof, prove

__all__ = ["Extent", "Proof", "prove"]
