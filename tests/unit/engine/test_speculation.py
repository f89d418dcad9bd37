"""What the user's choice of drafters comes to on a model with given numerics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.control.concurrency import SharedPolicy
from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.drafters.draft.draft import Draft
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.jacobi.lookahead import WindowSize
from edge_spec.drafters.protocol import Budget
from edge_spec.engine.draft_overlap import OverlappedDrafting
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.errors import UsageError
from edge_spec.exactness.batch_invariance import BY_CONSTRUCTION, BatchInvariance
from edge_spec.exactness.lossless import ExactPolicy, LosslessMode, keep_promise
from edge_spec.loader import check_capabilities
from edge_spec.models.device_names import DraftOverlap
from edge_spec.models.options import LoadOptions
from edge_spec.testing import ScriptedModel, random_logits

NOISY_BRANCHES = BatchInvariance(0.0, (1, 4), branch_margin=0.5, branch_invariant=False)
EXACT_BRANCHES = BatchInvariance(0.125, (1, 4))
MODEL = ScriptedModel(random_logits(9), 9)
PLAIN_ROUND = RoundStats(1, 0, 0, 1, PlainReason.NO_CANDIDATE, 0, 0.0, 1.0, 1.0)


def speculation_factory(
    batch_invariance: BatchInvariance,
    mode: LosslessMode = LosslessMode.TIES,
    **setting: Any,
) -> SpeculationFactory:
    return SpeculationFactory(
        DrafterContext(9, **setting),
        MODEL.capabilities,
        batch_invariance,
        keep_promise(mode, batch_invariance, lambda: 1.0),
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
    assert speculation.tie_margin == margin


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
    assert not branches(speculation) and speculation.tie_margin == 0
    assert not branches(speculation_factory(EXACT_BRANCHES, mode).choose("suffix"))


@pytest.mark.parametrize("mode", LosslessMode)
def test_draft_tokens_branch_in_every_mode_where_rows_agree_by_construction(
    mode: LosslessMode,
) -> None:
    speculation = speculation_factory(BY_CONSTRUCTION, mode).choose("suffix,recycling")
    assert branches(speculation) and not isinstance(speculation.policy, ExactPolicy)
    assert speculation.tie_margin == 0 and not speculation.replays


def test_without_drafters_there_are_no_ties() -> None:
    speculation = speculation_factory(EXACT_BRANCHES).choose("none")
    assert list(speculation.drafters) == [] and speculation.tie_margin == 0


def test_free_drafters_share_a_tree_and_a_draft_comes_after_them() -> None:
    draft = Draft(MODEL, 9)
    chosen = speculation_factory(EXACT_BRANCHES, drafts=[draft]).choose(
        "draft-model,suffix,recycling"
    )
    assert [drafter.name for drafter in chosen.drafters] == ["suffix+recycling", "draft-model"]
    chosen = speculation_factory(EXACT_BRANCHES, drafts=[draft]).choose("suffix,draft-model")
    assert [drafter.name for drafter in chosen.drafters] == ["suffix", "draft-model"]


@pytest.mark.parametrize(
    ("setting", "num_rows"),
    [
        ({}, 16),
        ({"draft_n_max": 3}, 4),
        ({"window": WindowSize(7, 5, 7)}, 56),  # more than the default: it was asked for
        ({"window": WindowSize(1, 2, 1)}, 16),
    ],
)
def test_a_round_has_room_for_the_window_that_was_asked_for(
    setting: dict[str, Any], num_rows: int
) -> None:
    policy: Any = speculation_factory(EXACT_BRANCHES, **setting).choose("lookahead").policy
    assert policy.max_draft_tokens == num_rows - 1


def test_a_snapshot_goes_on_in_drafters_of_the_same_names() -> None:
    used, fresh, other = (
        speculation_factory(EXACT_BRANCHES).choose(names)
        for names in ("suffix,lookahead", "suffix,lookahead", "jacobi")
    )
    for drafter in used.drafters:
        drafter.begin([1, 2, 3, 1])
    state = used.state_dict()
    assert any("pool" in name for name in state)
    fresh.load_state_dict(state)
    again = fresh.state_dict()
    assert again.keys() == state.keys()
    assert all(np.array_equal(again[name], state[name]) for name in state)
    with pytest.raises((KeyError, ValueError)):
        other.load_state_dict(state)


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
        ({"lookahead": "2,3,2"}, "window would not be used by --drafter auto"),
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


@pytest.mark.parametrize("names", ["draft-model", "cascade", "suffix,cascade"])
@pytest.mark.parametrize("overlap", DraftOverlap)
def test_a_draft_that_is_asked_goes_on_meanwhile_where_that_is_wanted(
    names: str, overlap: DraftOverlap
) -> None:
    made = replace(
        speculation_factory(EXACT_BRANCHES, drafts=[Draft(MODEL, 9)]), draft_overlap=overlap
    )
    anticipation = made.choose(names).anticipation
    assert isinstance(anticipation, OverlappedDrafting) == (overlap is not DraftOverlap.OFF)
    if anticipation is not None:
        assert (anticipation._trial is not None) == (overlap is DraftOverlap.AUTO)
    assert made.choose("suffix").anticipation is None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),  # on one device
        ({"draft_device": "cuda"}, True),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "draft_device": "cuda"}, False),
        ({"draft_overlap": DraftOverlap.ON}, True),
        ({"draft_overlap": DraftOverlap.OFF, "draft_device": "cuda"}, False),
    ],
)
def test_a_draft_goes_on_meanwhile_where_it_has_a_device_of_its_own(
    options: dict[str, Any], wanted: bool
) -> None:
    assert LoadOptions(draft=("d",), **options).anticipates == wanted


def test_threads_of_a_draft_are_those_of_its_target_if_not_its_own() -> None:
    for draft_threads, threads in ((None, 4), (1, 1)):
        options = LoadOptions(draft=("d",), threads=4, draft_threads=draft_threads)
        assert options.draft_runtime_options.threads == threads
        assert options.runtime_options.threads == 4


def test_a_fork_learns_for_itself_what_rows_cost() -> None:
    measured = RowCosts({1: 1.0, 8: 2.0})
    made = replace(
        speculation_factory(EXACT_BRANCHES, drafts=[Draft(MODEL, 9)]), costs=lambda: measured
    )
    for _ in range(40):
        measured.observe(1, 1.5)
    draft = Draft(MODEL, 9)
    fork = made.forked([draft])
    assert fork.setting.drafts == [draft] and fork.load is made.load
    assert fork.costs is not None and fork.costs() is fork.costs()
    assert fork.costs().at(1) == measured.at(1) > 1.2
    before = measured.at(1)
    for _ in range(40):
        fork.costs().observe(1, 9.0)
    assert fork.costs().at(1) > 2 * before and measured.at(1) == before


@pytest.mark.parametrize("mode", [LosslessMode.TIES, LosslessMode.ALWAYS])
def test_conversations_share_rows_where_a_limit_is_given(mode: LosslessMode) -> None:
    """Within the widths that agree, which pad what is left."""
    limited = replace(speculation_factory(EXACT_BRANCHES, mode), parallel_rows=4)
    limited.load.active = 4
    speculation = limited.choose("suffix")
    [drafter] = speculation.drafters
    drafter.begin([1, 2, 3, 1, 2, 3, 1, 2])
    plan = speculation.policy.choose([drafter], 2, Budget(8, 16))
    assert plan.plain_reason is PlainReason.SHARED and len(plan.tree) == 1
    ties = mode is LosslessMode.TIES
    assert isinstance(speculation.policy, SharedPolicy if ties else ExactPolicy)
    unlimited = speculation_factory(EXACT_BRANCHES, mode)
    unlimited.load.active = 4
    assert len(unlimited.choose("suffix").policy.choose([drafter], 2, Budget(8, 16)).tree) > 1


def test_the_rows_of_a_plain_step_are_free_only_in_passes_of_its_own() -> None:
    padded = replace(EXACT_BRANCHES, invariant_widths=(4, 8))
    made = replace(
        speculation_factory(padded, LosslessMode.ALWAYS),
        costs=lambda: RowCosts({1: 1.0, 2: 1.9, 4: 3.7, 8: 7.3}),
        shares_passes=True,
    )
    speculation = made.choose("suffix")  # and what fills the rows of a plain step
    for drafter in speculation.drafters:
        drafter.begin([1, 2, 3])
    rows = []
    for num_sharing in (1, 3, 1):
        speculation.policy.observe(replace(PLAIN_ROUND, num_sharing=num_sharing))
        rows.append(len(speculation.policy.choose(speculation.drafters, 3, Budget(8, 16)).tree))
    assert rows == [2, 1, 2]


def test_what_one_session_learnt_is_where_the_next_begins() -> None:
    """Through a drafter that is guarded and joined with others, as floats in a file."""
    first, second = (
        speculation_factory(EXACT_BRANCHES).choose("suffix,recycling") for _ in range(2)
    )
    counts = first.stats()
    assert set(counts) == {"suffix", "recycling", "suffix+recycling"}
    raised = {name: [2 * value for value in values] for name, values in counts.items()}
    second.load_stats(raised)
    assert second.stats() == raised != first.stats()


def test_what_was_learnt_by_another_version_is_left_out() -> None:
    speculation = speculation_factory(EXACT_BRANCHES).choose("suffix")
    before = speculation.stats()
    speculation.load_stats({"suffix": [1.0, 2.0], "other": [3.0]})
    assert speculation.stats() == before
