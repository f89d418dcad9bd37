"""Acceptance: which guessed rows the target would have written itself.

The rule here is the delta rule for deterministic candidates: with R the target's distribution at
a row, accept child x with probability R[x], otherwise set R[x] to zero, renormalize and try the
next child. It is applied in its equivalent form of drawing the target's own token once and
accepting the child that equals it: child x is then accepted with probability R[x], and a token
that is no child is drawn from R without the children. The draw belongs to the position
(sampling.Draws), so the text does not depend on what was guessed.
"""

from __future__ import annotations

from edge_spec.model import Forward
from edge_spec.sampling import Sampler
from edge_spec.tree import TokenTree, Verdict


def verify(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
    """Walks from row 0 along the children that equal the target's own choice.

    Commits nothing and leaves the sampler as it was.
    """
    tokens: list[int] = []
    accepted: list[int] = []
    row, near_ties = 0, 0
    while True:
        choice = sampler.choose(out.logits[row], tokens)
        tokens.append(choice.token)
        near_ties += choice.near_tie
        right = tree.child(row, choice.token)
        if right is None:
            return Verdict(tuple(tokens), tuple(accepted), not tree.children(row), near_ties)
        row = right
        accepted.append(row)
