"""Whether the models open where they were asked to, and which device took which operator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from edge_spec.core.model import Model, Session
from edge_spec.core.node_placement import TellsNodePlacement
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest, silent
from edge_spec.diagnostics.accept.row import CheckRow, judged, not_measured, passed
from edge_spec.models.resolve import resolve_model
from edge_spec.models.source import Source

_STEPS = 4
_CPU = "cpu"  # begins the name of its provider, in lower case
_HEAVY = ("attention", "matmul", "gemm")  # within the names of operators, in lower case


def check_target(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """Raises the real error of the library that cannot load it."""
    began = time.perf_counter()
    with request.opened() as model:
        yield _opened(model, time.perf_counter() - began)


def check_draft(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """Raises as `check_target` does."""
    assert request.draft is not None
    options = request.options(drafts=True)
    began = time.perf_counter()
    source = Source(request.draft, silent)
    draft = resolve_model(
        source, options.draft_runtime, options, silent, options.draft_providers
    ).open(options.draft_runtime_options)
    try:
        yield _opened(draft, time.perf_counter() - began)
    finally:
        draft.close()


def _opened(model: Model, load_s: float) -> CheckRow:
    session = model.open_session()
    try:
        session.prefill([0] * 4)
        began = time.perf_counter()
        session.forward(TokenTree.chain(0))
        pass_s = time.perf_counter() - began
        step_s = min(_timed(session) for _ in range(_STEPS))
    finally:
        session.close()
    can = model.capabilities
    rows = f"takes {'trees' if can.trees else 'chains only'}, {can.max_rows} rows a pass"
    return passed(
        "opens",
        f"loaded in {load_s:.1f} s, first pass {1e3 * pass_s:,.1f} ms, "
        f"then {1e3 * step_s:,.1f} ms; {rows}",
        load_s=load_s,
        first_pass_ms=1e3 * pass_s,
        step_ms=1e3 * step_s,
        trees=can.trees,
        rollback=can.rollback,
        max_rows=can.max_rows,
        context_tokens=model.config.context_length,
    )


def _timed(session: Session) -> float:
    """Of a row and its commit, until its scores are there."""
    began = time.perf_counter()
    session.forward(TokenTree.chain(0)).logits.copy()
    session.commit([0])
    return time.perf_counter() - began


def check_nodes(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """A provider may leave operators to the CPU, without a word: the heavy ones must not be."""
    with request.opened() as model:
        if not isinstance(model, TellsNodePlacement):
            found = f"not told: {request.runtime} does not say which device took what"
            yield not_measured("by provider", found)
            return
        yield judge_nodes(model.node_placement(), request.is_cpu)


def judge_nodes(placement: Mapping[str, Mapping[str, int]], on_cpu: bool) -> CheckRow:
    """placement: as `node_placement` has it. on_cpu: whether the CPU was asked for."""
    told = ", ".join(f"{name} {sum(nodes.values())}" for name, nodes in placement.items())
    numbers = {name: dict(nodes) for name, nodes in placement.items()}
    left: Counter[str] = Counter()
    for provider, nodes in placement.items():
        if provider.lower().startswith(_CPU) and not on_cpu:
            left.update({each: count for each, count in nodes.items() if _is_heavy(each)})
    found = f"nodes: {told or 'none'}"
    if left:
        heavy = ", ".join(f"{count} {name}" for name, count in left.items())
        found = f"the CPU has {heavy}, with copies both ways in each pass; {found}"
    return judged("by provider", bool(placement) and not left, found, nodes=numbers)


def _is_heavy(operator: str) -> bool:
    return any(part in operator.lower() for part in _HEAVY)
