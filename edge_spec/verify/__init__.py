"""Which guesses become text. Public: `verify`."""

from edge_spec.verify.walk import verify

__all__ = ["verify"]
