"""Drafts with an EAGLE head (Li et al. 2024, 2025): a draft model that reads its target's features.

Trees, samples and how sure the head must be are those of `DraftModelDrafter`.

A P-EAGLE head (Hui et al. 2026) scores several tokens in one pass. The rows after the pending
token's read a mask token beside features that were learnt for it, so no draft token waits for the
one before, and none depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from edge_spec.core.heads import EntryRows, HeadScores
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.draft.draft_tree import DraftChooser, candidates_after
from edge_spec.drafters.draft.synced_session import AheadChoice, Path
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel, TargetFeatures
from edge_spec.drafters.heads.independent import BlockDrafter, head_scores
from edge_spec.drafters.heads.layers import EagleNetwork
from edge_spec.drafters.protocol import Budget, Cost, DrafterTraits
from edge_spec.drafters.tree_builder import Candidate


class EagleChooser(DraftChooser):
    """Reads the scores of the tokens that a head scores, where these decide alone."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__(network.config.vocab_size, network.config.vocab_size)
        self._network = network

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> AheadChoice:
        if not self._sampler.prefers_by_logits:
            return super().choose(logits, path)
        return AheadChoice(*self._network.likeliest(logits)[0], None)

    def likeliest(self, logits: np.ndarray, path: Path) -> list[Candidate[Path]]:
        if not self._sampler.prefers_by_logits:
            return super().likeliest(logits, path)
        return candidates_after(path, self._network.likeliest(logits))

    def fitted(self, logits: np.ndarray) -> np.ndarray:
        return super().fitted(self._network.spread(logits[None])[0])


class EagleDrafter(DraftModelDrafter):
    """network: of the head; drafters of several conversations share it."""

    traits = DrafterTraits(
        trees=True, cost=Cost.PASS, samples=True, target_session=True, head="eagle"
    )

    def __init__(self, network: EagleNetwork, name: str = "eagle") -> None:
        self._network = network
        self._target = TargetFeatures(network.feature_layers, network.features_size, WINDOW)
        model = EagleModel(network, self._target.store)
        chooser = EagleChooser(network)
        vocab_size = network.config.vocab_size
        super().__init__(model, model.open_session(), vocab_size, name=name, chooser=chooser)
        self.reported_acceptance = network.reported_acceptance

    def attach(self, model: Model, session: Session) -> None:
        """Raises UnsupportedModelError where the runtime does not give features."""
        self._target.attach(session, self.name)

    def prepare(self, prompt: Sequence[int]) -> None:
        """Waits: the target's features of the prompt are not there yet."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._target.begin(prompt)
        super().begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        if not self._target.is_ready:
            return TokenTree.chain(pending)
        return super().propose(pending, budget)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._target.observe(out, verdict)
        super().observe(tree, out, verdict)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self._target.forget()

    def close(self) -> None:
        self._target.close()
        super().close()


class ParallelEagleDrafter(BlockDrafter):
    """network: of a head that has `EagleHead.masks`; drafters of several conversations share it.

    The entry of feature i, which token i + 1 is read beside, lies at position i + 1 of the text.
    """

    traits = DrafterTraits(trees=True, cost=Cost.PASS, target_session=True, head="eagle")
    _tokens_after = 1

    def __init__(self, network: EagleNetwork, name: str = "eagle") -> None:
        assert network.masks is not None
        self._network, self._masks = network, network.masks
        super().__init__(network, network, name, min(WINDOW, network.window or WINDOW))

    def _bind(self, cache: np.ndarray) -> None:
        self._step = self._network.bound_to(cache)

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        self._forget(len(self._target.text) - 2)  # the pending token's entry is scored anyway
        return super()._ask(heads)

    def _extra_rows(self, num_asked: int) -> int:
        return max(num_asked - 1, 0)

    def _read(self, start: int, end: int, num_asked: int) -> HeadScores:
        known, masks = end - start, self._extra_rows(num_asked)
        tokens = [*self._target.text[start + 1 : end + 1], *[self._masks.token] * masks]
        features = self._target.store.get(np.arange(start, end))
        count, first_slot = known + masks, start - self._first
        slots = np.arange(first_slot, first_slot + count)[:, None]
        seen = np.arange(first_slot + count)
        sees = (seen <= slots) & (seen > slots - self._window)
        _, logits = self._step(
            EntryRows(
                self._network.embed(np.array(tokens)),
                np.concatenate([features, np.repeat(self._masks.features[None], masks, axis=0)]),
                np.empty((0, self._network.config.hidden_size), np.float32),
                np.arange(count),
                np.arange(start + 1, start + 1 + count),
                first_slot,
                None if sees.all() else sees,
                np.arange(known - 1, count),  # a step scores something, if only to read
            )
        )
        found = head_scores(logits)
        return replace(found, likeliest=self._network.targets(found.likeliest))
