"""What the user's choice of drafters comes to on a model with given numerics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.modes import DraftOverlap, LosslessMode
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget
from edge_spec.engine.batch import Batch
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.errors import UsageError
from edge_spec.loader import check_capabilities
from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.batch_invariance import BY_CONSTRUCTION, BatchInvariance
from edge_spec.scheduler.lossless import ExactPolicy, keep_promise
from edge_spec.testing import ScriptedModel, random_logits

NOISY_BRANCHES = BatchInvariance(0.0, (1, 4), branch_invariant=False)
EXACT_BRANCHES = BatchInvariance(0.125, (1, 4))
MODEL = ScriptedModel(random_logits(9), 9)


def speculation_factory(
    batch_invariance: BatchInvariance,
    mode: LosslessMode = LosslessMode.TIES,
    **setting: Any,
) -> SpeculationFactory:
    return SpeculationFactory(
        DrafterContext(9, **setting),
        MODEL.capabilities,
        batch_invariance,
        keep_promise(mode, batch_invariance),
    )


def branches(speculation: Speculation) -> bool:
    """Whether a text that went on in two ways is drafted both ways."""
    for drafter in speculation.drafters:
        drafter.begin([1, 2, 1, 3, 1])
    policy: Any = speculation.policy
    getattr(policy, "_policy", policy).min_confidence = 0.0
    plan = policy.choose(speculation.drafters, 1, Budget(8, 16))
    return not plan.tree.is_chain


@pytest.mark.parametrize(
    ("names", "batch_invariance", "branching", "margin"),
    [
        ("auto", NOISY_BRANCHES, False, 0.0),
        ("auto", EXACT_BRANCHES, True, 0.125),
        ("suffix,recycling", NOISY_BRANCHES, False, 0.0),
        ("suffix,recycling", EXACT_BRANCHES, True, 0.125),
    ],
)
def test_draft_tokens_branch_only_where_that_changes_no_number(
    names: str, batch_invariance: BatchInvariance, branching: bool, margin: float
) -> None:
    speculation = speculation_factory(batch_invariance).choose(names)
    assert branches(speculation) == branching
    assert speculation.lossless.tie_margin == margin


@pytest.mark.parametrize("mode", LosslessMode)
@pytest.mark.parametrize("agrees", [False, True])
def test_a_window_is_scored_beside_the_chain_where_that_changes_no_number(
    mode: LosslessMode, agrees: bool
) -> None:
    found = replace(NOISY_BRANCHES, invariant_widths=(1, 4, 16), probe_invariant=agrees)
    speculation = speculation_factory(found, mode).choose("lookahead")
    [drafter] = speculation.drafters
    drafter.begin([1, 2, 3])
    plan = speculation.policy.choose([drafter], 3, Budget(20, 16))
    assert (len(plan.tree) > 1) == (agrees or mode is LosslessMode.TIES)
    assert plan.num_verified is None or plan.num_verified == plan.tree.leading_chain


@pytest.mark.parametrize("mode", [LosslessMode.AUTO, LosslessMode.ALWAYS])
def test_passes_keep_to_widths_that_agree_and_have_no_ties(mode: LosslessMode) -> None:
    speculation = speculation_factory(NOISY_BRANCHES, mode).choose("suffix,lookahead")
    assert isinstance(speculation.policy, ExactPolicy)
    assert not branches(speculation) and speculation.lossless.tie_margin == 0
    assert not branches(speculation_factory(EXACT_BRANCHES, mode).choose("suffix"))


@pytest.mark.parametrize("mode", LosslessMode)
def test_draft_tokens_branch_in_every_mode_where_rows_agree_by_construction(
    mode: LosslessMode,
) -> None:
    speculation = speculation_factory(BY_CONSTRUCTION, mode).choose("suffix,recycling")
    assert branches(speculation) and not isinstance(speculation.policy, ExactPolicy)
    assert speculation.lossless.tie_margin == 0 and not speculation.lossless.replays


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lookahead": "16,5,1"}, "takes 68 rows a pass"),
        ({"draft_n_max": 64}, "too many"),
    ],
)
def test_a_round_larger_than_a_pass_is_refused_when_the_model_is_opened(
    options: dict[str, Any], told: str
) -> None:
    options["drafter"] = "lookahead"
    with pytest.raises(UsageError, match=told):
        check_capabilities("test", "scripted", MODEL, LoadOptions(**options))
    bounded = ScriptedModel(random_logits(9), 9)
    bounded.capabilities = replace(MODEL.capabilities, max_rows=100, rollback_rows=50)
    with pytest.raises(UsageError, match=told):
        check_capabilities("test", "scripted", bounded, LoadOptions(**options))
    roomy = replace(MODEL.capabilities, max_rows=100)
    wide = ScriptedModel(random_logits(9), 9)
    wide.capabilities = roomy
    check_capabilities("test", "scripted", wide, LoadOptions(**options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lookahead": "2,3,2"}, "--lookahead would not be used by --drafter auto"),
        ({"jacobi": "random", "drafter": "suffix"}, "Add jacobi to --drafter"),
        ({"corpora": ("a.txt",), "drafter": "suffix"}, "Add corpus to --drafter"),
        (
            {"lookahead": "4,3,4", "drafter": "lookahead", "draft_n_max": 3},
            "up to 15 tokens a round, and at most 3",
        ),
        ({"draft_threads": 2}, "--draft-threads is for a draft, and there is none"),
        ({"draft_overlap": DraftOverlap.ON}, "--draft-overlap on is for a draft"),
        ({"draft_threads": 0, "draft": ("d",)}, "draft-threads is 0"),
        ({"parallel_rows": 0}, "parallel-rows is 0"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LoadOptions(**options)


@pytest.mark.parametrize("widths", [(1, 4), (2, 4)])
@pytest.mark.parametrize(
    ("active", "reason", "rows"), [(1, None, 4), (2, None, 2), (4, PlainReason.SHARED, 1)]
)
def test_conversations_share_rows_where_a_limit_is_given(
    widths: tuple[int, ...], active: int, reason: PlainReason | None, rows: int
) -> None:
    """Within the widths that agree, which pad what is left: a plain step has its rows."""
    factory = speculation_factory(BatchInvariance(0.125, widths), LosslessMode.ALWAYS)
    speculation, session = factory.choose("suffix"), MODEL.open_session()
    batch, prompt = Batch(MODEL, factory.lossless, parallel_rows=4), [1, 2, 3, 1, 2, 3, 1, 2]
    batch.active = active
    session.prefill(prompt[:-1])
    limits = GenerationLimits(9, frozenset(), 512, 16, min_rows=widths[0])
    decoder = Decoder(session, speculation.drafters, speculation.policy, batch=batch)
    rounds: list[RoundStats] = []
    next(decoder.decode(prompt, Sampler(SamplingParams(), prompt), limits, rounds.append))
    assert rounds[0].plain_reason is reason and rounds[0].num_rows == rows
