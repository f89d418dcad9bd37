"""Tools for tests of drafters, runtimes and applications; nothing here is used at run time.

`ScriptedModel` is an exact model. Every runtime must pass `check_session`, and those whose sessions
share passes also `check_sharing`.
"""

from edge_spec.testing.scripted import NextLogits, ScriptedModel, ScriptedSession, random_logits
from edge_spec.testing.session import SessionReport, check_session, check_sharing

__all__ = [
    "NextLogits",
    "ScriptedModel",
    "ScriptedSession",
    "SessionReport",
    "check_session",
    "check_sharing",
    "random_logits",
]
