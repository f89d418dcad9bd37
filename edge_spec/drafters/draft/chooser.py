"""Chooses tokens by a draft's logits: as its target does, or by samples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.drafters.draft.ahead import AheadChoice, Reading
from edge_spec.drafters.draft.candidates import (
    FIRST,
    SAMPLED,
    SIBLING_KINDS,
    candidates_after,
    kind_of,
    ranked,
)
from edge_spec.drafters.draft.draft_tree import Draw, Path
from edge_spec.drafters.tree_builder import Candidate


class DraftChooser:
    """Chooses greedily, or in the target's races of random numbers, or samples: as `use_sampler`
    says.

    draft_vocab, target_vocab: numbers of ids. What the draft does not know cannot be next.
    """

    def __init__(self, draft_vocab: int, target_vocab: int) -> None:
        self._vocab_size = min(draft_vocab, target_vocab)
        self._target_vocab = target_vocab
        self.use_sampler(Sampler(SamplingParams(), ()))

    def use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.samples = sampler.sampled_drafts

    def choose(self, logits: np.ndarray, path: Sequence[int]) -> AheadChoice:
        """logits: [vocab of the draft] after the text and the draft tokens `path`."""
        return self._choice(self._preference(logits, path))

    def read(self, logits: np.ndarray, path: Sequence[int]) -> Reading:
        """Chooses, and keeps what is likeliest for later."""
        preference = self._preference(logits, path)
        return Reading(self._choice(preference), partial(ranked, preference))

    def likeliest(self, logits: np.ndarray, path: Path) -> list[Candidate[Path]]:
        """Returns the candidates that a tree may branch into."""
        return candidates_after(path, ranked(self._preference(logits, path)))

    def draw(self, logits: np.ndarray, path: Path, count: int) -> Draw:
        """Samples up to `count` different tokens, each from what those before it left."""
        probs = self._sampler.probs(self.fitted(logits), path)
        left, tokens = probs.copy(), []
        for _ in range(min(count, int(np.count_nonzero(probs)))):
            tokens.append(self._sampler.draw(left, Purpose.DRAFT))
            left[tokens[-1]] = 0
        return Draw(tokens, SIBLING_KINDS[: len(tokens)], probs)

    def fitted(self, logits: np.ndarray) -> np.ndarray:
        """Returns [vocab of the target] logits. Raises ValueError for those that no choice can be
        made by."""
        logits = logits[: self._vocab_size]
        if not np.isfinite(logits.max()):  # NaN, where any of them is
            raise ValueError("logits that are not finite")
        missing = self._target_vocab - len(logits)
        return np.pad(logits, (0, missing), constant_values=-np.inf) if missing else logits

    def _preference(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        """Returns [vocab of the target] weights; probabilities, where the draft samples."""
        weigh = self._sampler.probs if self.samples else self._sampler.preference
        return weigh(self.fitted(logits), path)

    def _choice(self, preference: np.ndarray) -> AheadChoice:
        if self.samples:
            token = self._sampler.draw(preference, Purpose.DRAFT)
            return AheadChoice(token, kind_of(SAMPLED, float(preference.max())), preference)
        token = int(preference.argmax())
        return AheadChoice(token, kind_of(FIRST, preference[token] / preference.sum()), None)
