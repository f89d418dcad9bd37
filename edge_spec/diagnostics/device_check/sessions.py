"""Checks that a model opens on a device, keeps what sessions promise, and scores as elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median

import numpy as np

from edge_spec.core.model import Model, TellsNodePlacement
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.device_check.request import DeviceCheckRequest, silent
from edge_spec.diagnostics.doctor.finding import Finding, fault, judged, note, ok
from edge_spec.diagnostics.doctor.scores import kl_divergence
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel, resolve_model
from edge_spec.models.source import Source
from edge_spec.placement.measure import Effort, measure
from edge_spec.testing import FaultyModel, check_session, check_trees

CONTEXT_TOKENS = 512  # of the models that are compared; the whole of it is filled once
PROMPTS = (12, 300)  # tokens; kernels of attention change within the first hundreds
# Of the scores' deviation. Other kernels and float16 differ by a few hundredths, the same rows in
# passes of another width by up to a tenth; a wrong mask or position by about one.
TOLERANCE = 0.25
ELSEWHERE = "Use another device or runtime, and report it."
_MOST_CONTEXT = 4096  # of a model whose context cannot be shortened, to fill it
_FARTHER = 4.0  # times what a conversion said of itself on another text (doctor/scores.py)
_REFERENCE_BYTES = 600_000_000  # of a model's files, up to which the numpy runtime takes seconds
_CHAIN = (-1, 0, 1, 2, 3, 4, 5, 6)
_BRANCHES = (-1, 0, 1, 1, 0, 4, 4, 6)
_HEAVY = ("attention", "matmul", "gemm")  # within the names of operators, in lower case
_STEPS = 4

_EFFORT = Effort(max_s=30.0, min_rounds=2)
_ROUNDS, _PROMPT_TOKENS, _ROWS = 8, 128, 4
# Of a round's time, the pass. Less is outside of it: the device was not done when it was timed, or
# keeping rows takes as long as scoring them.
_LEAST_SHARE = 0.5
_COARSE_S = 1e-4  # rounds shorter than that tell nothing of a device


def check_opening(request: DeviceCheckRequest) -> Iterator[Finding]:
    """Raises the real error of the library that cannot load it."""
    began = time.perf_counter()
    with request.opened() as model:
        load_s = time.perf_counter() - began
        with closing(model.open_session()) as session:
            session.prefill([0] * 4)
            seconds = []
            for _ in range(1 + _STEPS):
                began = time.perf_counter()
                session.forward(TokenTree.chain(0)).logits.copy()
                session.commit([0])
                seconds.append(time.perf_counter() - began)
        first_ms, step_ms = 1e3 * seconds[0], 1e3 * min(seconds[1:])
        can = model.capabilities
        yield ok(
            "opens",
            f"loaded in {load_s:.1f} s, first pass {first_ms:,.1f} ms, then {step_ms:,.1f} ms; "
            f"takes {'trees' if can.trees else 'chains only'}, {can.max_rows} rows a pass",
            load_s=load_s,
            first_pass_ms=first_ms,
            step_ms=step_ms,
        )
        if isinstance(model, TellsNodePlacement):
            yield judge_nodes(model.node_placement(), request.is_cpu)


def judge_nodes(placement: Mapping[str, Mapping[str, int]], on_cpu: bool) -> Finding:
    """Finds heavy operators that a provider has left to the CPU without a word. placement: as
    `node_placement` has it. on_cpu: whether the CPU was asked for."""
    counts = ", ".join(f"{name} {sum(nodes.values())}" for name, nodes in placement.items())
    left: Counter[str] = Counter()
    for provider, nodes in placement.items():
        if provider.lower().startswith("cpu") and not on_cpu:
            heavy = {each: n for each, n in nodes.items() if any(h in each.lower() for h in _HEAVY)}
            left.update(heavy)
    found = f"nodes: {counts or 'none'}"
    if left:
        names = ", ".join(f"{count} {name}" for name, count in left.items())
        found = f"the CPU has {names}, with copies both ways in each pass; {found}"
    numbers = {name: dict(nodes) for name, nodes in placement.items()}
    return judged("operators", bool(placement) and not left, found, ELSEWHERE, nodes=numbers)


def check_chains(request: DeviceCheckRequest) -> Iterator[Finding]:
    with request.opened(context_length=CONTEXT_TOKENS) as model:
        chains = FaultyModel(model, ())  # the same model, which hides that it takes branches
        chains.capabilities = replace(model.capabilities, trees=False)
        yield _promises("chains", chains)
        yield from _compared("chains", request, model, _CHAIN)


def check_branches(request: DeviceCheckRequest) -> Iterator[Finding]:
    with request.opened(context_length=CONTEXT_TOKENS) as model:
        if not model.capabilities.trees:
            yield note("trees", "it takes chains only")
            return
        yield _promises("trees", model)
        yield from _compared("trees", request, model, _BRANCHES)


def _promises(check: str, model: Model) -> Finding:
    """Holds the model to what it promises of itself, whatever other devices score."""
    if model.config.context_length > _MOST_CONTEXT:
        return note(check, f"a context of {model.config.context_length} tokens is not filled")
    tolerance = TOLERANCE * float(_scores(model, 1, _CHAIN).std())
    if not np.isfinite(tolerance):
        return fault(check, "its scores are no numbers", ELSEWHERE)
    try:
        if check == "trees":
            largest, widths = check_trees(model, tolerance), ""
        else:
            report = check_session(model, tolerance)
            agreeing = ", ".join(map(str, report.batch_invariance.invariant_widths))
            largest, widths = report.max_difference, f"; equal bit for bit in passes of {agreeing}"
    except AssertionError as error:
        return fault(check, f"a promise of sessions is broken: {error}", ELSEWHERE)
    found = f"promises are kept; a row scored in different ways differs by {largest:.4f} at most"
    return ok(check, f"{found}{widths}", max_logit=largest, tolerance_logit=tolerance)


def _compared(
    check: str, request: DeviceCheckRequest, model: Model, parents: Sequence[int]
) -> Iterator[Finding]:
    """Compares scores with those of the same weights elsewhere, after a short and a longer text."""
    room = model.config.context_length - len(parents)
    lengths = sorted({min(tokens, room) for tokens in PROMPTS})
    found = {tokens: _scores(model, tokens, parents) for tokens in lengths}
    wrong = [tokens for tokens in lengths if not np.isfinite(found[tokens]).all()]
    if wrong:
        yield fault(check, f"after {wrong[0]} tokens its scores are no numbers", ELSEWHERE)
        return
    other = _other(request)
    if other is None:
        yield note(check, "not compared: the reference would take too long for this model")
        return
    where, resolved, options = other
    allowed_kl = _FARTHER * (request.resolved(request.options()).loss or 0.0)
    with closing(resolved.open(options.runtime_options)) as expected:
        for tokens in lengths:
            scores = _scores(expected, tokens, parents)
            what = f"after {tokens} tokens, against {where}"
            kl = allowed_kl if request.is_cpu else 0.0
            yield judge_scores(check, what, found[tokens], scores, kl)


def judge_scores(
    check: str, what: str, found: np.ndarray, expected: np.ndarray, allowed_kl: float = 0.0
) -> Finding:
    """found, expected: [rows, vocab] float32. allowed_kl: nats a token that a conversion, and no
    device, may be off."""
    if found.shape != expected.shape:
        return fault(check, f"{what}: shape {found.shape}, not {expected.shape}", ELSEWHERE)
    error = found.astype(np.float64) - expected
    deviation = expected.std(axis=1).clip(min=1e-9)
    of_deviation = float((error.std(axis=1) / deviation).max())
    divergence = kl_divergence(expected, found)
    return judged(
        check,
        of_deviation <= TOLERANCE or divergence <= allowed_kl,
        f"{what}: scores differ by {of_deviation:.3f} of their deviation (up to {TOLERANCE} is "
        f"rounding), KL divergence {divergence:.2g}",
        ELSEWHERE,
        of_deviation=of_deviation,
        kl_divergence=divergence,
        max_logit=float(np.abs(error).max()),
    )


def _other(request: DeviceCheckRequest) -> tuple[str, ResolvedModel, LoadOptions] | None:
    """Returns what scores are compared with: the runtime's own CPU, or for that the reference;
    None where nothing reads the weights in time."""
    if not request.is_cpu:
        options = request.options(device="cpu", context_length=CONTEXT_TOKENS)
        return f"{request.runtime} on the CPU", request.resolved(options), options
    source = Source(request.model, silent)
    is_bundle = source.formats is not None and "gguf" not in source.formats
    if request.runtime == "reference" or is_bundle or source.num_bytes > _REFERENCE_BYTES:
        return None
    options = request.options(runtime="reference", device="cpu", context_length=CONTEXT_TOKENS)
    return "the reference", resolve_model(source, "reference", options, silent), options


def _scores(model: Model, prompt_tokens: int, parents: Sequence[int]) -> np.ndarray:
    """[rows, vocab] float32, of random tokens: the same ones on every device."""
    rows = len(parents)
    drawn = np.random.RandomState(0).randint(0, model.config.vocab_size, prompt_tokens + rows)
    with closing(model.open_session()) as session:
        session.prefill(drawn[:prompt_tokens].tolist())
        tokens = drawn[prompt_tokens:].astype(np.int32)
        tree = TokenTree(tokens, np.array(parents, np.int32), np.ones(rows, np.float32))
        return session.forward(tree).logits.copy()


def check_passes(request: DeviceCheckRequest, effort: Effort = _EFFORT) -> Iterator[Finding]:
    with request.opened() as model:
        yield from judge_clock(model)
        profile = measure(model, effort, lambda fraction: None)
    for costs in profile.contexts:
        pass_ms = {str(rows): 1e3 * each for rows, each in costs.seconds.items()}
        shown = ", ".join(f"{rows}: {each:,.3g}" for rows, each in pass_ms.items())
        found = f"at {costs.context_tokens} tokens, rows: ms {shown}"
        yield ok("passes", found, context_tokens=costs.context_tokens, pass_ms=pass_ms)
    yield ok(
        "passes",
        f"{profile.prefill_tokens_per_s:,.0f} tokens/s of a prompt; certain to "
        f"{profile.spread:.0%} after {profile.rounds} rounds",
        prompt_tokens_per_s=profile.prefill_tokens_per_s,
        spread=profile.spread,
    )


def judge_clock(model: Model, clock: Callable[[], float] = time.perf_counter) -> Iterator[Finding]:
    """Times rounds as a whole beside their parts: what a part leaves to the next one shows."""
    rows = min(_ROWS, model.capabilities.max_rows)
    prompt = min(_PROMPT_TOKENS, max(1, model.config.context_length - 2 * rows))
    drawn = np.random.RandomState(0).randint(0, model.config.vocab_size, prompt + rows).tolist()
    chain = TokenTree.chain(drawn[prompt], drawn[prompt + 1 :])
    times: list[tuple[float, ...]] = []
    with closing(model.open_session()) as session:
        for _ in range(_ROUNDS + 1):
            at = [clock()]
            session.prefill(drawn[:prompt])
            at.append(clock())
            session.forward(chain).logits.copy()
            at.append(clock())
            session.commit([0])
            session.rollback(prompt)
            start = clock()
            session.forward(chain)
            passed = clock()
            session.commit([0])
            session.rollback(prompt)
            session.forward(chain).logits.copy()  # waits for whatever is left to do
            # Two passes and what lies between.
            whole = (clock() - start) / 2
            session.rollback(0)
            times.append((whole, passed - start, at[1] - at[0], at[2] - at[1]))
    # The first round binds buffers.
    round_s, pass_s, prefill_s, first_s = (median(each) for each in zip(*times[1:], strict=True))
    yield judged(
        "clock",
        pass_s >= _LEAST_SHARE * round_s or round_s < _COARSE_S,
        f"a pass takes {1e3 * pass_s:,.3g} of a round's {1e3 * round_s:,.3g} ms",
        f"Passes end before the device is done. {ELSEWHERE}",
    )
    late_s = first_s - round_s
    yield judged(
        "clock",
        late_s <= max(prefill_s, _COARSE_S),
        f"a prompt takes {1e3 * prefill_s:,.3g} ms, the pass after it {1e3 * first_s:,.3g} ms",
        f"Reading ends before the device is done. {ELSEWHERE}",
    )
