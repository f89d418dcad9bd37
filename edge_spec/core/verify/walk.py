"""Acceptance: which draft rows become text, so that the text keeps the target's distribution.

Deterministic candidates follow the delta rule: with R the target's distribution at a row, accept
child x with probability R[x], else set R[x] to zero, renormalize and try the next child.
Equivalently, the code draws the target's own token once and accepts the child that equals it. The
draw belongs to the position (sampling.Draws), so the text does not depend on the draft.

Sampled children are verified against their `draft_probs`: siblings one by one, a chain as a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify.block import verify_block
from edge_spec.core.verify.siblings import verify_siblings


def verify(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
    """Walk from row 0 along accepted children. Commits nothing; without sampled rows the sampler is
    unchanged."""
    tokens: list[int] = []
    accepted: list[int] = []
    row, ties = 0, list[int]()
    while True:
        if tree.is_sampled(row):
            chain = tree.sampled_chain(row)
            if chain:
                rows, token = verify_block(tree, chain, out, sampler, tokens)
            else:
                rows, token = verify_siblings(tree, row, out, sampler, tokens)
            accepted += rows
            tokens += tree.tokens[rows].tolist()
            if token is not None:
                return _verdict([*tokens, token], accepted, False, ties)
            row = rows[-1]
            continue
        choice = sampler.choose(out.logits[row], tokens)
        if choice.near_tie:
            ties.append(len(tokens))
        tokens.append(choice.token)
        right = tree.child(row, choice.token)
        if right is None:
            return _verdict(tokens, accepted, not tree.children(row), ties)
        row = right
        accepted.append(row)


def _verdict(
    tokens: Sequence[int], accepted: Sequence[int], exhausted: bool, ties: Sequence[int]
) -> Verdict:
    first_tie = ties[0] if ties else None
    return Verdict(tuple(tokens), tuple(accepted), exhausted, len(ties), first_tie)
