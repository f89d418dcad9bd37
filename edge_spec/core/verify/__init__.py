"""Decide which draft tokens become text. Public: `verify`."""

from edge_spec.core.verify.walk import verify

__all__ = ["verify"]
