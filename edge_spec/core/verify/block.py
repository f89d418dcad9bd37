"""Block verification of a sampled chain (Sun et al. 2024, Block Verification Accelerates
Speculative Decoding).

Token by token, a draft token x is accepted with probability min(1, p(x) / q(x)), with p the
target's distribution and q the one that x was sampled from (Leviathan et al. 2023). A decision on
the whole chain lets later draft tokens make up for an unlikely one: acceptance is never lower in
expectation, and the distribution is the same.
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
    """Return the accepted leading rows of `chain`, and the next token if not all are accepted.
    chain: sampled rows, each an only child. path: tokens between the output and the first row."""
    draft_tokens = tree.tokens[chain].tolist()
    target_probs: list[np.ndarray] = []
    draft_probs: list[np.ndarray] = []
    # weights[i]: relative weight of the first i draft tokens, target over draft, at most 1.
    weights = [1.0]
    for i, (row, candidate) in enumerate(zip(chain, draft_tokens, strict=True)):
        p = sampler.probs(out.logits[tree.parents[row]], [*path, *draft_tokens[:i]])
        q = tree.draft_probs[row]
        assert q is not None  # a sampled chain has them
        target_probs.append(p)
        draft_probs.append(q)
        weights.append(_ratio(weights[-1] * float(p[candidate]), float(q[candidate])))
        if weights[-1] == 0:  # an impossible token stays impossible
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
    if mass == 0:  # p equals q except for rounding
        left = target_probs[count]
    return list(chain[:count]), sampler.draw(left, Purpose.RECOVERY)


def _ratio(target: float, draft: float) -> float:
    """Return target / draft, at most 1; 0 if the draft could not have drawn it."""
    if draft <= 0:
        return 0.0
    return 1.0 if target >= draft else target / draft
