"""Checks that variants open with what is installed here, and score alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import numpy as np

from edge_spec.core import entry_points
from edge_spec.core.model import Model, Runtime, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.doctor.finding import Finding, fault, of_error, ok, warning
from edge_spec.diagnostics.doctor.subject import Examined, Subject
from edge_spec.diagnostics.doctor.text import scored_tokens
from edge_spec.errors import DeviceError, EdgeSpecError, MissingDependencyError
from edge_spec.models import runtimes

_TOKENS = 48  # that are scored
_CHUNK_ROWS = 16
_REASON_CHARACTERS = 200  # of a library's own error
# Two conversions within d and e of one source are within about 2 (d + e) of each other: small
# divergences grow like squared distances. As much again, since the text is another one; the rest
# is for conversions that lose next to nothing.
_FARTHER, _ROUNDING = 4.0, 0.01

_Scored = tuple[Examined, np.ndarray]  # its logits: [tokens, vocab] float32


def check_scores(subject: Subject) -> Iterator[Finding]:
    """One variant is open at a time."""
    for role, variants in subject.roles.items():
        if variants[0].is_other:
            yield warning("opens", "not opened: it is not converted yet", "Start it once.").of(role)
            continue
        tokens = scored_tokens(variants[0], min(_TOKENS, variants[0].config.context_length))
        scored: list[_Scored] = []
        for each in variants:
            subject.progress(f"Scoring with {each}", 0.0)
            finding, logits = _score(each, tokens)
            subject.progress(f"Scoring with {each}", 1.0)
            yield finding.of(role)
            if logits is not None:
                scored.append((each, logits))
        for other in scored[1:]:
            yield _compared(role, scored[0], other).of(role)


def _score(each: Examined, tokens: Sequence[int]) -> tuple[Finding, np.ndarray | None]:
    """Scores with the first runtime that can be used here."""
    reason = f"no runtime is installed that reads {each.format}"
    for runtime in _readers(each.format):
        try:
            with closing(runtime.open(each.source, RuntimeOptions())) as model:
                logits = _logits(model, tokens)
        except (MissingDependencyError, DeviceError) as error:
            reason = f"{runtime.name}: {error.shown}"
            continue
        except EdgeSpecError as error:
            return fault("opens", f"{each}: {error.shown}", error.remedy), None
        except Exception as error:  # a library may fail in any way on a graph that is not ours
            why = of_error(error)[:_REASON_CHARACTERS]
            return fault("opens", f"{each}: {runtime.name} failed: {why}", "Export it again."), None
        if not np.isfinite(logits).all():
            return fault("opens", f"{each}: its scores are no numbers", "Export it again."), None
        return ok("opens", f"{each}, with {runtime.name}"), logits
    return warning("opens", f"{each} was not opened: {reason}", "Check it where it runs."), None


def _readers(format: str) -> list[Runtime]:
    """The usual runtimes first; those whose own modules cannot be imported here are left out."""
    usual = [name for name, _ in runtimes.AUTO_RUNTIMES]
    others = [name for name in entry_points.names("runtimes") if name not in usual]
    found = []
    for name in (*usual, *others):
        with suppress(MissingDependencyError):
            found.append(runtimes.load_runtime(name))
    return [runtime for runtime in found if format in runtimes.formats_of(runtime)]


def _logits(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, vocab] float32."""
    width = min(_CHUNK_ROWS, model.capabilities.max_rows)
    chunks = []
    with closing(model.open_session()) as session:
        for start in range(0, len(tokens), width):
            chain = TokenTree.chain(tokens[start], tokens[start + 1 : start + width])
            chunks.append(session.forward(chain).logits.copy())
            session.commit(range(len(chain)))
    return np.concatenate(chunks)


def _compared(role: str, first: _Scored, second: _Scored) -> Finding:
    """KL(first || second), mean over the tokens, against what both say of their sources."""
    (one, before), (other, after) = first, second
    what = f"{role} {one.format} and {other.format}"
    if before.shape != after.shape:
        return fault("scores", f"{what} score {before.shape} and {after.shape}", "Export it again.")
    divergence = kl_divergence(before, after)
    same = int((before.argmax(axis=1) == after.argmax(axis=1)).sum())
    found = (
        f"{what}: KL divergence {divergence:.3f}, the same likeliest token at {same} of "
        f"{len(before)}"
    )
    stated = [_stated(one), _stated(other)]
    if None in stated:
        return warning(
            "scores", f"{found}; unchecked when they were written", "Export it without --no-check."
        )
    bound = _FARTHER * sum(value for value in stated if value is not None) + _ROUNDING
    if not divergence <= bound:  # also true for NaN
        return fault("scores", f"{found}; expected {bound:.3f} or less", "Export it again.")
    return ok("scores", f"{found} (at most {bound:.3f})")


def _stated(each: Examined) -> float | None:
    """Returns the KL divergence from its source that its export stated."""
    return None if each.listed is None else each.listed.parity.get("kl_divergence")


def kl_divergence(before: np.ndarray, after: np.ndarray) -> float:
    """before, after: [tokens, vocab] logits. The mean over tokens of KL(before || after), nats."""
    logs = []
    for logits in (before, after):
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1).mean())
