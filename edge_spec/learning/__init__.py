"""Learning while idle: Medusa heads that are trained on a user's own answers, on this machine.

`chat --learn` and `serve --learn` keep what the target computed for its answers (`texts`), a
process of its own trains heads on them while nobody is answered (`idle_learning`,
`head_training`), and a head drafts once it was measured to beat what it would replace on answers
that it had not seen (`trial`). What is kept stands in one folder a model (`folder`), and
`edge-spec learn forget` removes it.
"""
