"""Finds the installed runtimes that can run a model, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator

from edge_spec.diagnostics.doctor.finding import Finding, note, ok
from edge_spec.models import runtimes
from edge_spec.models.bundle import is_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.models.runtime_choice import where_it_runs
from edge_spec.models.source import Source


def check_runtimes(source: Source) -> Iterator[Finding]:
    """Says nothing of bundles, which are of one format, and of the demo model, which is in all.
    Raises ModelFileError."""
    if source.is_demo or source.formats is not None or is_bundle(source.path):
        return
    can, refusals = where_it_runs(source, runtimes.known_runtimes(), LoadOptions())
    if can:
        yield ok("runtimes", f"runs on {', '.join(can)}")
    for refusal in refusals:
        yield note("runtimes", f"not on {refusal.runtime}: {refusal.error.shown}")
