"""Whether a device scores as it has to: chains and trees, judged apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline, TimedModel
from edge_spec.diagnostics.accept.request import AcceptRequest, silent
from edge_spec.diagnostics.accept.row import CheckRow, failed, judged, not_measured, passed
from edge_spec.diagnostics.doctor.scores import kl_divergence
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel, resolve_model
from edge_spec.models.source import Source
from edge_spec.testing.session import check_session, check_trees

CONTEXT_TOKENS = 512  # of the models that are compared; the whole of it is filled once
_MOST_CONTEXT = 4096  # of a model whose context cannot be shortened, to fill it
_PROMPTS = (12, 300)  # tokens; kernels of attention change within the first hundreds
# Of the scores' deviation. Other kernels and float16 differ by a few hundredths, the same rows in
# passes of another width by up to a tenth; a wrong mask or position by about one.
TOLERANCE = 0.25
_FARTHER = 4.0  # times what a conversion said of itself on another text (doctor/scores.py)
_REFERENCE_BYTES = 600_000_000  # of a model's files, up to which the numpy runtime takes seconds
_CHAIN = (-1, 0, 1, 2, 3, 4, 5, 6)
_BRANCHES = (-1, 0, 1, 1, 0, 4, 4, 6)


@dataclass(frozen=True)
class ScoreDifference:
    """How scores [rows, vocab] are off from those of another device."""

    max_logit: float  # the largest difference of a logit
    of_deviation: float  # the standard deviation of the worst row's error over that of its scores
    kl_divergence: float  # nats, mean over rows
    same_top: float  # share of rows with the same likeliest token

    @classmethod
    def between(cls, found: np.ndarray, expected: np.ndarray) -> ScoreDifference:
        error = found.astype(np.float64) - expected
        deviation = expected.std(axis=1).clip(min=1e-9)
        return cls(
            max_logit=float(np.abs(error).max()),
            of_deviation=float((error.std(axis=1) / deviation).max()),
            kl_divergence=kl_divergence(expected, found),
            same_top=float((found.argmax(axis=1) == expected.argmax(axis=1)).mean()),
        )


def check_chains(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    with _opened(request) as model:
        yield _promises(TimedModel(model, deadline, trees=False), _check_chains)
        yield from _compared(request, model, _CHAIN, deadline)


def check_branches(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    with _opened(request) as model:
        if not model.capabilities.trees:
            yield not_measured("promises", "it takes chains only")
            return
        yield _promises(TimedModel(model, deadline), _check_branches)
        yield from _compared(request, model, _BRANCHES, deadline)


def _check_chains(model: Model, tolerance: float) -> tuple[float, str, dict[str, Any]]:
    """The largest difference of a logit, what else there is to tell, and that in numbers."""
    report = check_session(model, tolerance)
    widths = report.batch_invariance.invariant_widths
    told = f"; rows agree bit for bit in passes of {', '.join(map(str, widths))}"
    return report.max_difference, told, {"invariant_widths": list(widths)}


def _check_branches(model: Model, tolerance: float) -> tuple[float, str, dict[str, Any]]:
    return check_trees(model, tolerance), "", {}


def _opened(request: AcceptRequest) -> closing[Model]:
    options = request.options(context_length=CONTEXT_TOKENS)
    return closing(request.resolved(options).open(options.runtime_options))


def _promises(
    model: Model, check: Callable[[Model, float], tuple[float, str, dict[str, Any]]]
) -> CheckRow:
    """Holds the model to what it promises of itself, whatever other devices score."""
    if model.config.context_length > _MOST_CONTEXT:
        found = f"a context of {model.config.context_length} tokens, which would have to be filled"
        return not_measured("promises", found)
    scores = _scores(model, 1, _CHAIN)
    tolerance = TOLERANCE * float(scores.std())
    if not np.isfinite(tolerance):
        return failed("promises", "its scores are no numbers")
    try:
        largest, told, numbers = check(model, tolerance)
    except AssertionError as error:
        return failed("promises", str(error), tolerance_logit=tolerance)
    found = f"kept; a row scored in different ways differs by {largest:.4f} in a logit at most"
    numbers |= {"max_logit": largest, "tolerance_logit": tolerance}
    return passed("promises", f"{found}{told}", **numbers)


def _compared(
    request: AcceptRequest, model: Model, parents: Sequence[int], deadline: Deadline
) -> Iterator[CheckRow]:
    """Against the same weights elsewhere, after a short and a longer text."""
    room = model.config.context_length - len(parents)
    lengths = sorted({min(tokens, room) for tokens in _PROMPTS})
    found = {tokens: _scores(TimedModel(model, deadline), tokens, parents) for tokens in lengths}
    finite = {tokens: bool(np.isfinite(scores).all()) for tokens, scores in found.items()}
    other = _other(request)
    if other is None or not all(finite.values()):
        for tokens in lengths:
            name = f"after {tokens} tokens"
            if not finite[tokens]:
                yield failed(name, "its scores are no numbers: it overflows, or computes wrong")
            elif other is None:
                yield not_measured(name, "the reference would take too long for this model")
            else:
                yield not_measured(name, "other scores of it are no numbers")
        return
    where, resolved, options = other
    with closing(resolved.open(options.runtime_options)) as expected:
        timed = TimedModel(expected, deadline)
        allowed = _allowed_kl(request)
        for tokens in lengths:
            scores = _scores(timed, tokens, parents)
            yield judge_scores(tokens, found[tokens], scores, where, allowed)


def _allowed_kl(request: AcceptRequest) -> float:
    """Nats a token that a conversion, and no device, may be off from the reference; 0 where the
    same weights are compared."""
    options = request.options()
    return _FARTHER * (request.resolved(options).loss or 0.0) if request.is_cpu else 0.0


def judge_scores(
    tokens: int, found: np.ndarray, expected: np.ndarray, where: str, allowed_kl: float = 0.0
) -> CheckRow:
    """found, expected: [rows, vocab] float32. where: what expected was scored on. allowed_kl: nats
    a token that the weights themselves are off."""
    name = f"after {tokens} tokens"
    if found.shape != expected.shape:
        return failed(name, f"scores of shape {found.shape}, and {expected.shape} on {where}")
    difference = ScoreDifference.between(found, expected)
    return judged(
        name,
        difference.of_deviation <= TOLERANCE or difference.kl_divergence <= allowed_kl,
        f"against {where}: a logit differs by {difference.max_logit:.3f} at most, "
        f"{difference.of_deviation:.3f} of the scores' deviation (up to {TOLERANCE} is rounding), "
        f"KL divergence {difference.kl_divergence:.2g}, the same likeliest token in "
        f"{difference.same_top:.0%} of the rows",
        **asdict(difference),
        allowed_kl=allowed_kl,
        against=where,
    )


def _other(request: AcceptRequest) -> tuple[str, ResolvedModel, LoadOptions] | None:
    """What the scores are compared with: the runtime's own CPU, or for that the reference."""
    if not request.is_cpu:
        options = request.options(device="cpu", context_length=CONTEXT_TOKENS)
        return f"{request.runtime} on the CPU", request.resolved(options), options
    source = Source(request.model, silent)
    if request.runtime == "reference" or source.num_bytes > _REFERENCE_BYTES:
        return None
    if source.formats is not None and "gguf" not in source.formats:
        return None  # a bundle alone: its weights are in no form that the reference reads
    options = LoadOptions(runtime="reference", device="cpu", context_length=CONTEXT_TOKENS)
    return "the reference", resolve_model(source, "reference", options, silent), options


def _scores(model: Model, prompt_tokens: int, parents: Sequence[int]) -> np.ndarray:
    """[rows, vocab] float32, of random tokens: the same ones on every device."""
    rows = len(parents)
    drawn = np.random.RandomState(0).randint(0, model.config.vocab_size, prompt_tokens + rows)
    session = model.open_session()
    try:
        session.prefill(drawn[:prompt_tokens].tolist())
        tokens = drawn[prompt_tokens:].astype(np.int32)
        tree = TokenTree(tokens, np.array(parents, np.int32), np.ones(rows, np.float32))
        return session.forward(tree).logits.copy()
    finally:
        session.close()
