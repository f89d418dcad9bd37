"""`edge-spec distill`: trains a drafter for a model on what the model itself writes, here.

The model answers prompts (`answers`), what its layers compute of the answers is kept on disk
(`features`), and a small network learns from it what comes next (`training`), measured on held-out
conversations. With `--learn` the same happens with a user's own answers (`idle_learning`).
"""
