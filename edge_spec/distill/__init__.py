"""`edge-spec distill`: train a drafter on the model's own answers.

The model answers prompts (`answers`), its hidden states are stored on disk (`features`), and a
small network learns from them what comes next (`training`), evaluated on held-out conversations.
`--learn` does the same with a user's own answers (`idle_learning`).
"""
