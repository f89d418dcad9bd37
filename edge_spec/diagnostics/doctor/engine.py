"""What `edge-spec doctor` finds of the plan that a start would open: whether the draft fits its
target, whether both fit in memory, and whether speculation pays, by what was measured before."""

from __future__ import annotations

import reprlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from edge_spec.diagnostics.doctor.model import CONVERSATION, Examined
from edge_spec.diagnostics.doctor.report import Finding, note, ok, warning
from edge_spec.diagnostics.report_files import Document
from edge_spec.models.devices import format_bytes
from edge_spec.models.draft_choice import LARGEST_SHARE
from edge_spec.models.memory import forecast, require_fit
from edge_spec.models.model_plan import PreparedModel
from edge_spec.scheduler.cost import RowCosts, forecast_speedup
from edge_spec.scheduler.engine_plan import EnginePlan
from edge_spec.scheduler.lossless import keep_promise
from edge_spec.scheduler.profile import profile_key
from edge_spec.scheduler.row_findings import ROWS, rows_key
from edge_spec.text.vocabulary import compare


@dataclass(frozen=True)
class Opening:
    """What a start would open: the target, and the drafts of the plan."""

    plan: EnginePlan
    models: Sequence[Examined]

    @property
    def prepared(self) -> list[PreparedModel]:
        return [each.prepared for each in self.models if each.prepared is not None]

    @property
    def is_converted(self) -> bool:
        return len(self.prepared) == len(self.models)

    @property
    def plan_command(self) -> str:
        """Return the command that measures this plan."""
        drafts = [word for each in self.plan.drafts for word in ("--draft", each.source.model)]
        return shlex.join(["edge-spec", "plan", self.plan.source.model, *drafts])


_SAMPLE = "The naïve café, 1,024 * 3.5 = 3584;\n\tdef f(x): return x**2  # 東京 🙂\n"
_SHOWN = 3
_LISTED = 30  # in JSON


def check_pair(target: Examined, draft: Examined, numbers: Document) -> Iterator[Finding]:
    if target.config is None or draft.config is None:
        yield note("tokens", "not known before both are converted")
        return
    yield from _tokens(target, draft, numbers)
    ends = [sorted(each.text.eos_ids) for each in (target, draft)]
    if numbers["vocabulary"]["same"] and ends[0] != ends[1]:
        found = f"the target's texts end in {ends[0]}, the draft's in {ends[1]}"
        yield warning("ends", found, "Draft tokens at the end of an answer may be wrong.")
    share = draft.config.num_parameters / target.config.num_parameters
    numbers["size_share"] = share
    found = f"the draft has {share:.0%} of the target's parameters"
    if share <= LARGEST_SHARE:
        yield ok("size", found)
    else:
        most = f"Choose one with at most {LARGEST_SHARE:.0%}"
        yield warning("size", found, f"{most}: each draft token takes a step of it.")
    length, whole = draft.config.context_length, target.config.context_length
    found = f"the draft reads {length} tokens, the target {whole}"
    if length >= whole:
        yield ok("context", found)
    else:
        found += f": after {length} nothing is drafted and rounds are plain"
        remedy = f"Give --context {length}, or a draft with a longer context."
        yield warning("context", found, remedy)


def _tokens(target: Examined, draft: Examined, numbers: Document) -> Iterator[Finding]:
    """Compare two vocabularies, and find what follows from a difference: how many tokens of the
    draft stand for each of the target's, in one text of several languages and code."""
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    text = _SAMPLE + "".join(str(message["content"]) for message in CONVERSATION)
    in_target, in_draft = (len(each.text.tokenizer.encode(text)) for each in (target, draft))
    compared, ratio = compare(known, drafted), in_draft / in_target
    numbers["vocabulary"] = {
        "same": compared.is_same,
        "drafting": "draft-model" if compared.is_same else "retokenized",
        "target_size": len(known),
        "draft_size": len(drafted),
        "num_shared_ids": compared.num_shared,
        "num_different": len(compared.different),
        "num_shared_texts": len(known.keys() & drafted.keys()),
        "different": [
            {"id": id, "target": token, "draft": other}
            for id, token, other in compared.different[:_LISTED]
        ],
        "draft_tokens_per_target_token": ratio,
    }
    if compared.is_same:
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
    )
    shown = "; ".join(
        f"{id}: {reprlib.repr(token)} | {reprlib.repr(other)}"
        for id, token, other in compared.different[:_SHOWN]
    )
    if shown:
        yield note("tokens", shown)


def check_memory(opening: Opening, numbers: Document) -> Iterator[Finding]:
    """Forecast the memory with a full context. Raises what a start would."""
    if not opening.is_converted:
        missing = " and ".join(each.role for each in opening.models if each.prepared is None)
        yield note(
            "forecast",
            f"not known: the {missing} is converted for {opening.plan.target.name} first",
            f"Start it once, or run {opening.plan_command}.",
        )
        return
    (target, *drafts), options = opening.prepared, opening.plan.options
    full = forecast(target, drafts, options)
    if full is None:
        yield note("forecast", f"{target.runtime.name} does not tell what its models take")
        return
    own = target.config.context_length
    tokens = min(own, options.context_length or own)
    numbers["memory"] = {
        "context_tokens": tokens,
        "models": [asdict(each) for each in full.models],
        "total_bytes": full.total,
        "free_bytes": full.free,
        "fits": full.fits,
    }
    for each in full.models:
        sizes = (each.memory.weights, each.memory.cache, each.memory.work + each.memory.library)
        weights, cache, rest = map(format_bytes, sizes)
        yield ok(each.role, f"{each.runtime}: {weights} weights, {cache} cache, {rest} beside")
    require_fit(target, drafts, options)
    found = f"{full}, with {tokens} tokens of text"
    if full.fits:
        yield ok("together", found)
    else:
        remedy = "Give a shorter --context, a smaller quantization or no --draft."
        yield warning("together", f"{found}: more than is free", remedy)


_DRAFT_TOKENS = range(1, 9)
_WIDTHS = range(1, _DRAFT_TOKENS[-1] + 2)  # rows of the passes that verify them
_SHOWN_TOKENS = (1, 2, 4, 8)
_SLOW = 1.0  # steps of the target that one of the draft takes
_PRECISION = 1e-4


class Costs(NamedTuple):
    """The costs of one round: passes by rows, and what one draft token takes; 0 where it is looked
    up in text."""

    rows: RowCosts
    draft_s: float


def check_speed(opening: Opening, numbers: Document) -> Iterator[Finding]:
    """Nothing is measured here: what the plan says, and what profiles have left."""
    numbers["plan"] = opening.plan.explain()
    for line in opening.plan.explain()[1:]:
        what, _, told = line.partition(": ")
        yield ok(what, told)
    target = opening.models[0]
    if target.prepared is not None:
        key = profile_key(target.plan.source, target.prepared, target.plan.how)
        rows = ROWS.known(rows_key(key, target.prepared.config))
        if rows is None:
            yield note("lossless", "found at the first start, and kept")
        else:
            promised = keep_promise(opening.plan.options.lossless_mode, rows)
            yield ok("lossless", promised.describe())
    known = [replace(opening.plan, target=each.plan).costs for each in opening.models]
    missing = [
        f"the {each.role} on {each.plan.name}"
        for each, costs in zip(opening.models, known, strict=True)
        if not costs.is_scaled
    ]
    if missing:
        told = f"not measured: no profile of {' and '.join(missing)}"
        yield note("break-even", told, f"Run {opening.plan_command}.")
        return
    draft_s = known[1].at(1) if len(known) > 1 else 0.0
    vocabulary = numbers.get("vocabulary", {"same": True})
    if not vocabulary["same"]:
        draft_s *= vocabulary["draft_tokens_per_target_token"]
    yield from _break_even(Costs(known[0], draft_s), numbers)


def break_even(num_draft_tokens: int, costs: Costs) -> float | None:
    """Return the acceptance of each draft token from which a round of them takes no longer a token
    than plain decoding; None where not even right draft tokens pay."""

    def pays(acceptance: float) -> bool:
        draft_s = num_draft_tokens * costs.draft_s
        return forecast_speedup([acceptance] * num_draft_tokens, costs.rows, draft_s) >= 1

    low, high = 0.0, 1.0
    if not pays(high):
        return None
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _break_even(costs: Costs, numbers: Document) -> Iterator[Finding]:
    step_s = costs.rows.at(1)
    share = costs.draft_s / step_s
    least = {count: break_even(count, costs) for count in _DRAFT_TOKENS}
    numbers["break_even"] = {
        "step_ms": 1e3 * step_s,
        "draft_step_ms": 1e3 * costs.draft_s or None,
        "row_shares": {rows: costs.rows.at(rows) / step_s for rows in _WIDTHS},
        "acceptance": least,
    }
    shares = ", ".join(f"{rows} rows {costs.rows.at(rows) / step_s:.2f}" for rows in (2, 4, 8))
    drafting = f", a draft token {share:.2f}" if share else ""
    yield ok("step", f"{1e3 * step_s:.3g} ms; in steps: {shares}{drafting}")
    if all(each is None for each in least.values()):
        remedy = "Use --drafter none, or a smaller draft."
        yield warning("break-even", "speculation never pays here", remedy)
    else:
        percents = {n: "never" if each is None else f"{each:.0%}" for n, each in least.items()}
        shown = ", ".join(f"{count}: {percents[count]}" for count in _SHOWN_TOKENS)
        yield ok("break-even", f"right draft tokens needed, of {shown}")
    if share >= _SLOW:
        yield warning(
            "step",
            f"a step of the draft takes {share:.2f} of the target's",
            "Choose a smaller draft, or another --draft-runtime or --draft-device.",
        )
