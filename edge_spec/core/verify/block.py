"""Block verification of a sampled chain (Sun et al. 2024, Block Verification Accelerates
Speculative Decoding).

Token by token, a draft token x is accepted with probability min(1, p(x) / q(x)), p being the
target's distribution and q the one that x was sampled from (Leviathan et al. 2023). Decided for the
whole chain at once, draft tokens that follow can make up for an unlikely one: never fewer tokens
are accepted in expectation, and the text has the same distribution. One draft token alone is the
same either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree


def verify_block(
    tree: TokenTree,
    chain: Sequence[int],
    out: Forward,
    sampler: Sampler,
    path: Sequence[int],
) -> tuple[list[int], int | None]:
    """The leading rows of `chain` that are accepted, and the token after them where not all are.

    chain: sampled rows, each the only child of the one before it. path: the tokens between the
    output and its first row.
    """
    draft_tokens = tree.tokens[chain].tolist()
    target_probs: list[np.ndarray] = []
    draft_probs: list[np.ndarray] = []
    # weights[i]: how likely the target finds the first i draft tokens, as far as the draft does.
    weights = [1.0]
    for i, (row, candidate) in enumerate(zip(chain, draft_tokens, strict=True)):
        p = sampler.probs(out.logits[tree.parents[row]], [*path, *draft_tokens[:i]])
        q = tree.draft_probs[row]
        assert q is not None  # what makes a chain a sampled one
        target_probs.append(p)
        draft_probs.append(q)
        weights.append(_ratio(weights[-1] * float(p[candidate]), float(q[candidate])))
        if weights[-1] == 0:  # nothing makes up for an impossible draft token
            break
    draws = [sampler.uniform(Purpose.ACCEPTANCE) for _ in target_probs]
    if draws[-1] < weights[-1]:
        return list(chain), None
    for count in range(len(target_probs) - 1, -1, -1):
        left = weights[count] * target_probs[count]
        left -= draft_probs[count]
        np.maximum(left, 0, out=left)
        mass = float(left.sum())
        if count == 0 or draws[count - 1] * (mass + 1 - weights[count]) < mass:
            break
    if mass == 0:  # p equals q but for rounding
        left = target_probs[count]
    return list(chain[:count]), sampler.draw(left, Purpose.RECOVERY)


def _ratio(target: float, draft: float) -> float:
    """target / draft, 1 at most; 0 for what the draft could not have written."""
    if draft <= 0:
        return 0.0
    return 1.0 if target >= draft else target / draft
