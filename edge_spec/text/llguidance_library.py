"""Opens llguidance, an optional library, which follows the grammars of answers."""

from __future__ import annotations

from types import ModuleType

from edge_spec.errors import MissingDependencyError


def open_llguidance() -> ModuleType:
    """Raises MissingDependencyError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise MissingDependencyError(
            "answers of a given form need llguidance, which is not installed",
            remedy='Run: pip install "edge-spec[grammar]".',
        ) from None
    return llguidance
