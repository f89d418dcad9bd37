"""How long an answer may be where nobody says."""

from __future__ import annotations

from edge_spec.text.parts.answer_form import AnswerForm

TEXT_TOKENS = 512  # small models repeat themselves, up to the end of the context
THOUGHT_TOKENS = 3584  # beside them, of models that think


def answer_tokens(
    form: AnswerForm | None,
    text_tokens: int = TEXT_TOKENS,
    thought_tokens: int = THOUGHT_TOKENS,
) -> int:
    """Returns the tokens of the text, and room for the thought before it: its budget, if it has
    one. thought_tokens: 0 for no room beside the text's."""
    if form is None or form.thought is None or form.is_closed or not thought_tokens:
        return text_tokens
    return text_tokens + (thought_tokens if form.budget is None else form.budget)
