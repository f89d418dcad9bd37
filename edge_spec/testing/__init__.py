"""Parts for tests of drafters, runtimes and applications; nothing here is used at run time.

`ScriptedModel` is an exact model for tests of drafters, `check_session` the test that every
runtime has to pass, `check_sharing` that of runtimes whose sessions share passes.
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
