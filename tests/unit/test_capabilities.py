"""A model that cannot do something is refused or spared when the engine is built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_spec import loader
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import UnsupportedModelError
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, random_logits


class Forked:
    """Proposes two siblings below a chain of one."""

    name = "forked"

    def propose(self, pending, budget):
        return TokenTree(np.array([pending, 1, 2, 3]), np.array([-1, 0, 1, 1]), np.ones(4))


def test_a_cache_that_cannot_rewind_is_refused_before_anything_runs():
    model = ScriptedModel(random_logits(5), 5)
    model.capabilities = replace(model.capabilities, rollback=False)
    with pytest.raises(UnsupportedModelError, match="m on scripted cannot rewind its cache"):
        loader.check_capabilities("m", "scripted", model, loader.LoadOptions())


@pytest.mark.parametrize(("trees", "rows"), [(True, 4), (False, 3)])
def test_branches_reach_only_a_model_that_takes_them(trees, rows):
    plan = FixedPolicy(branches=trees).choose([Forked()], 0, Budget(8, 8))
    assert len(plan.tree) == rows
