"""Makes drafters of one answer: of the form that it has to have, of a text predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec.core.sampling import Sampler
from edge_spec.drafters.lookup.corpus_text import text_tokens
from edge_spec.drafters.lookup.grammar import ForcedDrafter
from edge_spec.drafters.lookup.prediction import PredictionDrafter, num_appeared
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.components import TargetComponents
from edge_spec.engine.request import AnswerOptions, context_length_of
from edge_spec.engine.results import GenerationResult, PredictionCounts


@dataclass(frozen=True)
class AnswerDrafters:
    """Holds those that an answer has beside its engine's. prediction: the predicted tokens."""

    drafters: Sequence[Drafter]
    prediction: Sequence[int] | None

    def tell(self, result: GenerationResult) -> None:
        """Adds to an answer that has ended what came true of its prediction."""
        if self.prediction is not None:
            appeared = num_appeared(self.prediction, [token.id for token in result.tokens])
            result.prediction = PredictionCounts(appeared, len(self.prediction) - appeared)


def answer_drafters(
    parts: TargetComponents, sampler: Sampler, options: AnswerOptions
) -> AnswerDrafters:
    """Returns those that the options of an answer ask for."""
    drafters: list[Drafter] = [] if sampler.constraint is None else [ForcedDrafter()]
    text = options.get("prediction")
    if text is None:
        return AnswerDrafters(drafters, None)
    tokenizer = parts.text.tokenizer
    # An answer has no room for more.
    tokens = text_tokens(text, tokenizer, tokenizer.encode(""))[: context_length_of(parts)]
    return AnswerDrafters([*drafters, PredictionDrafter(tokens)], tokens)
