"""`edge-spec distill`: trains a drafter for a model on what the model itself writes, here.

The model answers prompts through its own runtime (`answers`), what its layers compute of the
answers is kept on disk (`features`), and a small network learns from that what the model writes
next (`training`). How much of it would be accepted is measured on conversations that were held out.
With `--learn` the same training runs on a user's own answers while nobody is answered
(`idle_learning`).
"""
