"""Check a start's plan: does the draft fit its target, do both fit in memory, and does speculation
pay by earlier measurements?"""

from __future__ import annotations

import reprlib
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from edge_spec.diagnostics.doctor.model import CONVERSATION, Examined
from edge_spec.diagnostics.doctor.report import Finding, note, ok, warning
from edge_spec.models.devices import format_bytes
from edge_spec.models.draft_choice import LARGEST_SHARE
from edge_spec.models.memory import forecast, require_fit
from edge_spec.scheduler.cost import RowCosts, forecast_speedup
from edge_spec.scheduler.engine_plan import EnginePlan
from edge_spec.scheduler.lossless import keep_promise
from edge_spec.scheduler.profile import profile_key
from edge_spec.scheduler.row_findings import ROWS, rows_key
from edge_spec.text.vocabulary import compare

_SAMPLE = "The naïve café, 1,024 * 3.5 = 3584;\n\tdef f(x): return x**2  # 東京 🙂\n"
_SHOWN = 3


def check_pair(target: Examined, draft: Examined) -> Iterator[Finding]:
    if target.config is None or draft.config is None:
        yield note("tokens", "not known before both are converted")
        return
    ratio = tokens_ratio(target, draft)
    yield from _tokens(target, draft, ratio)
    ends = [sorted(each.text.eos_ids) for each in (target, draft)]
    if ratio is None and ends[0] != ends[1]:
        found = f"the target's texts end in {ends[0]}, the draft's in {ends[1]}"
        yield warning("ends", found, "Draft tokens at the end of an answer may be wrong.")
    share = draft.config.num_parameters / target.config.num_parameters
    found = f"the draft has {share:.0%} of the target's parameters"
    if share <= LARGEST_SHARE:
        yield ok("size", found, share=share)
    else:
        most = f"Choose one with at most {LARGEST_SHARE:.0%}"
        yield warning("size", found, f"{most}: each draft token takes a step of it.", share=share)
    length, whole = draft.config.context_length, target.config.context_length
    found = f"the draft reads {length} tokens, the target {whole}"
    if length >= whole:
        yield ok("context", found)
    else:
        found += f": after {length} nothing is drafted and rounds are plain"
        remedy = f"Give --context {length}, or a draft with a longer context."
        yield warning("context", found, remedy)


def _tokens(target: Examined, draft: Examined, ratio: float | None) -> Iterator[Finding]:
    """Explain differences of the vocabularies. ratio: `tokens_ratio`."""
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    compared = compare(known, drafted)
    if ratio is None:
        alone = [len(each) - compared.num_shared for each in (known, drafted)]
        beyond = f"; {alone[0]} only the target's, {alone[1]} the draft's" if any(alone) else ""
        yield ok("tokens", f"the same {compared.num_shared} ids{beyond}")
        return
    yield warning(
        "tokens",
        f"{len(compared.different)} of {compared.num_shared} ids that both have differ "
        f"({len(known)} | {len(drafted)} tokens): draft tokens are passed on as text, {ratio:.2f} "
        "tokens of the draft for each of the target's",
        "One of the target's family is quicker: edge-spec pull hf:ORG/NAME --draft auto.",
        num_different=len(compared.different),
        draft_tokens_per_target_token=ratio,
    )
    shown = "; ".join(
        f"{id}: {reprlib.repr(token)} | {reprlib.repr(other)}"
        for id, token, other in compared.different[:_SHOWN]
    )
    if shown:
        yield note("tokens", shown)


def tokens_ratio(target: Examined, draft: Examined) -> float | None:
    """Return draft tokens per target token in text of several languages and code; None if the
    vocabularies are equal."""
    both = [each.text.tokenizer for each in (target, draft)]
    if compare(*(each.vocabulary() for each in both)).is_same:
        return None
    text = _SAMPLE + "".join(str(message["content"]) for message in CONVERSATION)
    in_target, in_draft = (len(each.encode(text)) for each in both)
    return in_draft / in_target


def check_memory(plan: EnginePlan, models: Sequence[Examined]) -> Iterator[Finding]:
    """Forecast memory with a full context. Raises like a start."""
    prepared = [each.prepared for each in models if each.prepared is not None]
    if len(prepared) < len(models):
        missing = " and ".join(each.role for each in models if each.prepared is None)
        yield note(
            "forecast",
            f"not known: the {missing} is converted for {plan.target.name} first",
            f"Start it once, or run {_plan_command(plan)}.",
        )
        return
    target, *drafts = prepared
    full = forecast(target, drafts)
    if full is None:
        yield note("forecast", f"{target.runtime.name} does not tell what its models take")
        return
    own = target.config.context_length
    tokens = min(own, target.how.context_length or own)
    for each in full.models:
        sizes = (each.memory.weights, each.memory.cache, each.memory.work + each.memory.library)
        weights, cache, rest = map(format_bytes, sizes)
        yield ok(each.role, f"{each.runtime}: {weights} weights, {cache} cache, {rest} beside")
    require_fit(target, drafts)
    found = f"{full}, with {tokens} tokens of text"
    numbers = {"total_bytes": full.total, "free_bytes": full.free}
    if full.fits:
        yield ok("together", found, **numbers)
    else:
        remedy = "Give a shorter --context, a smaller quantization or no --draft."
        yield warning("together", f"{found}: more than is free", remedy, **numbers)


def _plan_command(plan: EnginePlan) -> str:
    drafts = [word for each in plan.drafts for word in ("--draft", each.source.model)]
    return shlex.join(["edge-spec", "plan", plan.source.model, *drafts])


_DRAFT_TOKENS = range(1, 9)
_SHOWN_TOKENS = (1, 2, 4, 8)
_SLOW = 1.0  # draft step in target steps
_STEPS = 10_000  # of acceptance


def check_speed(plan: EnginePlan, models: Sequence[Examined]) -> Iterator[Finding]:
    """Report the plan and stored profiles; measure nothing."""
    for line in plan.explain()[1:]:
        what, _, told = line.partition(": ")
        yield ok(what, told)
    target = models[0]
    if target.prepared is not None:
        key = profile_key(target.plan.source, target.prepared)
        rows = ROWS.known(rows_key(key, target.prepared.config))
        if rows is None:
            yield note("lossless", "found at the first start, and kept")
        else:
            promised = keep_promise(plan.options.lossless_mode, rows)
            yield ok("lossless", promised.describe())
    known = [replace(plan, target=each.plan).costs for each in models]
    missing = [
        f"the {each.role} on {each.plan.name}"
        for each, costs in zip(models, known, strict=True)
        if not costs.is_scaled
    ]
    if missing:
        told = f"not measured: no profile of {' and '.join(missing)}"
        yield note("break-even", told, f"Run {_plan_command(plan)}.")
        return
    draft_s = 0.0
    if len(known) > 1:
        draft_s = known[1].at(1) * (tokens_ratio(target, models[1]) or 1.0)
    yield from _break_even(known[0], draft_s)


def break_even(num_draft_tokens: int, rows: RowCosts, draft_s: float) -> float | None:
    """Return the acceptance per draft token from which a round pays; None if it never does.
    draft_s: seconds per draft token."""

    def pays(step: int) -> bool:
        chances = [step / _STEPS] * num_draft_tokens
        return forecast_speedup(chances, rows, num_draft_tokens * draft_s) >= 1

    found = bisect_left(range(_STEPS + 1), True, key=pays)
    return found / _STEPS if found <= _STEPS else None


def _break_even(rows: RowCosts, draft_s: float) -> Iterator[Finding]:
    """draft_s: seconds per draft token; 0 if looked up in text."""
    step_s = rows.at(1)
    share = draft_s / step_s
    least = {count: break_even(count, rows, draft_s) for count in _DRAFT_TOKENS}
    shares = ", ".join(f"{count} rows {rows.at(count) / step_s:.2f}" for count in (2, 4, 8))
    drafting = f", a draft token {share:.2f}" if share else ""
    steps_ms = {"step_ms": 1e3 * step_s, "draft_step_ms": 1e3 * draft_s}
    yield ok("step", f"{1e3 * step_s:.3g} ms; in steps: {shares}{drafting}", **steps_ms)
    if all(each is None for each in least.values()):
        remedy = "Use --drafter none, or a smaller draft."
        yield warning("break-even", "speculation never pays here", remedy)
    else:
        percents = {n: "never" if each is None else f"{each:.0%}" for n, each in least.items()}
        shown = ", ".join(f"{count}: {percents[count]}" for count in _SHOWN_TOKENS)
        yield ok("break-even", f"right draft tokens needed, of {shown}", acceptance=least)
    if share >= _SLOW:
        yield warning(
            "step",
            f"a step of the draft takes {share:.2f} of the target's",
            "Choose a smaller draft, or another --draft-runtime or --draft-device.",
        )
