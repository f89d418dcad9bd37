"""A form says which tensors a head has, by their names in each format and with their shapes."""

from __future__ import annotations

from edge_spec.exporters.heads.head_files import GGUF, HF, Form, parts

FORM = Form(
    "fc tables?",
    "layer first",
    "layer",
    parts("""
    fc      fc.bias  join        fc            wide
    tables  embed    tokens.own  token_embd    vocab,wide
    tables  order    order!      -             vocab
"""),
    parts("""
    layer  q.weight  attn.q  attn_q  wide,read
    first  norm      norm_1  -       wide
"""),
)
SIZES, LAYERS = {"wide": 3, "vocab": 9}, [{"read": 6}, {"read": 3}]
REQUIRED = {
    "fc.bias": (3,),
    "layers.0.q.weight": (3, 6),
    "layers.0.norm": (3,),
    "layers.1.q.weight": (3, 3),
}


def test_a_group_that_may_be_missing_is_required_whole_once_a_part_of_it_is_there() -> None:
    tables = {"embed": (9, 3), "order": (9,)}
    assert FORM.shapes(SIZES, LAYERS, set()) == REQUIRED
    for part in tables:
        assert FORM.shapes(SIZES, LAYERS, {part}) == REQUIRED | tables


def test_names_are_those_of_a_column_with_their_endings() -> None:
    assert FORM.names(HF).theirs.items() >= {
        "fc.bias": "join.bias",
        "embed": "tokens.own.weight",
        "order": "order",
        "layers.7.q.weight": "layers.7.attn.q.weight",
    }.items()  # fmt: skip
    found = FORM.names(GGUF, layer="blk.{}.", prefix="head.").theirs
    assert found["layers.0.q.weight"] == "head.blk.0.attn_q.weight"
    assert not {"order", "layers.0.norm"} & found.keys()
