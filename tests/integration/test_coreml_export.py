"""Core ML packages: the graph is the reference's, the package is what iOS 18 reads, and its size
is what its quantization promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.coreml import CoreMlExporter, recipes
from edge_spec.exporters.coreml.export import QUANTIZATIONS
from edge_spec.exporters.coreml.graph import ProgramBuilder
from edge_spec.exporters.coreml.package import read_function
from edge_spec.exporters.coreml.recipes import AneRecipe, GpuRecipe
from edge_spec.exporters.coreml.weights import CoreMlWeights, dense
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.static_layout import StaticShape
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.coreml.package import package_of, read_specification
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.static.layout import read_layout
from edge_spec.runtimes.static.session import StaticSession
from fixtures import families, tolerance
from fixtures.axes import each_first
from fixtures.coreml_in_numpy import NumpyProgram, open_in_numpy, signatures_of_program
from fixtures.silence import quiet

CONTEXT = 64
RECIPES = {"gpu": GpuRecipe, "ane": AneRecipe}
# Head sizes of 32, which the Neural Engine's recipe needs, and rows of whole blocks.
WIDE = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}

Open = Callable[..., Any]


def export(checkpoint: Any, out: Path, **options: Any) -> Bundle:
    CoreMlExporter().export(checkpoint, out, ExportOptions(**options), quiet)
    return open_bundle(out)


@pytest.fixture(scope="session")
def wide(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint that every recipe and quantization takes, stored as Q8_0."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return runtimes.open_checkpoint(tiny.write_gguf(tiny.build("llama-tied", **WIDE), path, "Q8_0"))


def float32_session(checkpoint: Any, recipe: str, hidden: bool = False) -> StaticSession:
    weights = CoreMlWeights(checkpoint, dense(np.float32), dense(np.float32), np.float32)
    config = replace(checkpoint.config, context_length=CONTEXT)
    graph = ProgramBuilder(
        weights, RECIPES[recipe](weights, config), config, StaticShape.of(CONTEXT), hidden
    )
    program = graph.build(lambda done: None)
    signatures = signatures_of_program(program)
    layout = read_layout(signatures, config, "the graph")
    return StaticSession(NumpyProgram(signatures, program.functions.__getitem__), layout, CONTEXT)


@pytest.mark.parametrize(
    ("variant", "recipe"),
    each_first(["llama", "llama-tied", "llama-bias", "llama-llama3", "qwen3"], list(RECIPES)),
)
def test_the_graph_scores_as_the_reference_does(
    variant: str,
    recipe: str,
    checkpoint: Open,
    random_tree: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32: prefill, a plain step, a tree, and a chain after a branch was committed."""
    monkeypatch.setattr(recipes, "ANE_MAX_SIZE", 100)  # the head in three parts
    source = checkpoint(variant)
    sessions = (float32_session(source, recipe, True), ReferenceModel(source).open_session())
    tree = random_tree(7, seed=3)
    passes = (TokenTree.chain(7), tree, TokenTree.chain(1, [2, 3]))
    for session in sessions:
        session.prefill([5, 9, 100, 33, 261])
    for each in passes:
        (found, expected) = (session.forward(each) for session in sessions)
        assert found.logits.shape == expected.logits.shape
        positions = sessions[0].length + len(each)
        for one, other in ((found.logits, expected.logits), (found.hidden, expected.hidden)):
            tolerance.require_float32(one, other, source.config, positions)
        for session in sessions:
            session.commit(each.path(len(each) - 1))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_graph_scores_real_weights_as_the_reference_does(
    recipe: str, demo_gguf: Path, random_tree: Open
) -> None:
    """The whole demo model in float32: after a prefill, a plain step and a tree."""
    source = runtimes.open_checkpoint(demo_gguf)
    sessions = (float32_session(source, recipe), ReferenceModel(source).open_session())
    prompt = np.random.RandomState(0).randint(0, source.config.vocab_size, 20).tolist()
    for session in sessions:
        session.prefill(prompt)
    for tree in (TokenTree.chain(7), random_tree(8, seed=5)):
        found, expected = (session.forward(tree).logits for session in sessions)
        # Logits are of the size of 30: 6e-5 was seen, through 30 layers, with kernels for SSE3,
        # AVX2 and AVX-512. Errors of trained layers grow less than those of random ones.
        assert np.abs(found - expected).max() < 1e-3


@pytest.mark.parametrize("compute", [pytest.param("gpu", marks=pytest.mark.slow), "ane"])
def test_the_package_is_what_ios_18_reads(compute: str, wide: Any, tmp_path: Path) -> None:
    from coremltools import target
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    bundle = export(wide, tmp_path / "out", compute=compute, context_length=CONTEXT, check=False)
    package = package_of(bundle)
    spec = read_specification(package)
    assert spec.specificationVersion == 9  # iOS 18, macOS 15
    functions = {each.name: each for each in spec.description.functions}
    assert list(functions) == ["rows_1", "rows_4", "rows_8", "prefill_64"]
    assert spec.description.defaultFunctionName == "rows_1"
    slots = 128  # 64 tokens and 7 of padding, in whole sixty-fours
    for name, function in functions.items():
        rows = int(name.rpartition("_")[2])
        shapes = {each.name: list(each.type.multiArrayType.shape) for each in function.input}
        assert shapes == {
            "input_ids": [1, rows],
            "position_ids": [rows],
            "write_slot": [1],
            "mask": [1, 1, rows, slots],
        }
        assert [each.name for each in function.output] == (
            ["hidden"] if name.startswith("prefill") else ["logits"]
        )
        states = {each.name: list(each.type.stateType.arrayType.shape) for each in function.state}
        config = wide.config
        heads = [config.num_kv_heads, slots, config.head_dim]
        layers = config.num_layers
        assert states == (
            {"kv_cache": [2 * layers, *heads]}
            if compute == "ane"
            else {"keys": [layers, *heads], "values": [layers, *heads]}
        )
        for operation in read_function(package, spec, name).operations:
            if operation.op_type == "coreml_update_state":  # of iOS 18; not in the registry's core
                continue
            assert min(SSAOpRegistry.core_ops[operation.op_type]) <= target.iOS18


@pytest.mark.parametrize("compute", RECIPES)
def test_functions_share_one_model_s_weights(compute: str, wide: Any, tmp_path: Path) -> None:
    bundle = export(wide, tmp_path / "out", compute=compute, quantization="fp16", check=False)
    (weights,) = (size for name, size in sizes(bundle).items() if name.endswith("weight.bin"))
    stored = sum(np.prod(wide.tensors[name].shape) for name in wide.names()) * 2
    rope = 2 * bundle.config.context_length * wide.config.head_dim  # cos and sin, in float16
    # Every constant begins at a multiple of 64 bytes after a header of 64: about 30 of them.
    assert stored + rope <= weights <= stored + rope + 30 * 128


def sizes(bundle: Bundle) -> dict[str, int]:
    return {name: entry.num_bytes for name, entry in bundle.manifest.files.items()}


# Bits a weight: levels, and a float16 scale for 32 of them, or a table for a group of rows.
PROMISED = {
    ("gpu", "int4"): (4.5, 8.5),
    ("gpu", "int8"): (8.5, 8.5),
    ("gpu", "fp16"): (16, 16),
    ("ane", "lut4"): (4.25, 6.25),
    ("ane", "lut6"): (6.25, 6.25),
    ("ane", "fp16"): (16, 16),
}


@pytest.mark.model
@pytest.mark.parametrize(
    ("compute", "name"),
    [
        pytest.param(*each, marks=() if each == ("gpu", "int4") else pytest.mark.slow)
        for each in PROMISED
    ],
)
def test_the_size_is_what_the_quantization_promises(
    compute: str, name: str, demo_gguf: Path, tmp_path: Path
) -> None:
    """On the demo model's first layer and its embedding."""
    source = runtimes.open_checkpoint(demo_gguf)
    bundle = export(
        source, tmp_path / "out", compute=compute, quantization=name, num_layers=1, check=False
    )
    (weights,) = (size for file, size in sizes(bundle).items() if file.endswith("weight.bin"))
    body, head = PROMISED[compute, name]
    config = source.config
    in_head = config.vocab_size * config.hidden_size
    in_body = sum(
        np.prod(source.tensors[tensor].shape)
        for tensor in source.names()
        if tensor.startswith("model.layers.0.")
    )
    promised = (in_body * body + in_head * head) / 8
    assert weights == pytest.approx(promised, rel=0.05)


def test_every_quantization_promises_a_size() -> None:
    known = {(compute, name) for compute, names in QUANTIZATIONS.items() for name in names}
    assert known == set(PROMISED)


@pytest.mark.parametrize(("kind", "name"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_blocks_of_a_gguf_file_are_carried_bit_for_bit(
    kind: str, name: str, tiny: ModuleType, tmp_path: Path
) -> None:
    path = tiny.write_gguf(tiny.build("llama", **WIDE), tmp_path / "model.gguf", kind)
    source = runtimes.open_checkpoint(path)
    bundle = export(source, tmp_path / "out", quantization=name, check=False)
    function = read_function(package_of(bundle), read_specification(package_of(bundle)), "rows_1")
    found = {
        operation.name: operation
        for operation in function.operations
        if operation.op_type == "constexpr_blockwise_shift_scale"
    }
    tensor = "model.layers.1.mlp.down_proj.weight"
    stored = found["model_layers_1_mlp_down_proj_weight_0"]
    levels, scales = stored.data.val.astype(np.float32), stored.scale.val.astype(np.float32)
    rows, columns = levels.shape
    blocks = levels.reshape(rows, columns // 32, 32) * scales[..., None]
    assert source.tensors[tensor].kind.name == kind
    assert np.array_equal(blocks.reshape(rows, columns), source.float32(tensor))


@pytest.mark.parametrize("compute", ["gpu", pytest.param("ane", marks=pytest.mark.slow)])
def test_hidden_states_come_where_they_were_asked_for(
    compute: str, wide: Any, tmp_path: Path
) -> None:
    bundle = export(
        wide, tmp_path / "out", compute=compute, quantization="fp16", hidden_states=True
    )
    model = open_in_numpy(bundle)
    assert model.capabilities.hidden_states
    found = model.open_session().forward(TokenTree.chain(3)).hidden
    expected = ReferenceModel(wide).open_session().forward(TokenTree.chain(3)).hidden
    # Float16 throughout: 11 bits of numbers up to 4, through two layers.
    assert found is not None and np.abs(found - expected).max() < 0.05


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compute": "npu"}, UsageError, "unknown compute unit 'npu'"),
        ({"quantization": "lut4"}, UsageError, "no quantization 'lut4' for the gpu"),
        ({"quantization": "int4", "compute": "ane"}, UsageError, "'int4' for the ane"),
        ({"block_size": 64}, UsageError, "block size 64"),
        ({"context_length": 0}, UsageError, "context of 0 tokens"),
        ({"context_length": 129}, UsageError, "Choose 1 to 128"),
        ({"num_layers": 3}, UsageError, "2 layers"),
        ({"compute": "ane"}, UnsupportedModelError, "head size that is a multiple of 32"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    checkpoint: Open,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message) as caught:
        export(checkpoint("llama"), tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compute", "context_length", "largest"), [("gpu", 1 << 20, 262_143), ("ane", 1 << 15, 16_384)]
)
def test_a_context_that_no_state_holds_is_refused(
    compute: str, context_length: int, largest: int, tiny: ModuleType, tmp_path: Path
) -> None:
    shape = WIDE | {"num_key_value_heads": 4, "num_hidden_layers": 32}
    model = tiny.build("llama", **shape, max_position_embeddings=1 << 20)
    source = runtimes.open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with pytest.raises(UsageError, match=f"holds {largest} of this model. Choose a smaller"):
        export(source, tmp_path / "out", compute=compute, context_length=context_length)


def test_rows_that_are_no_whole_blocks_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    source = runtimes.open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match="48 weights are not whole blocks of 32"):
        export(source, tmp_path / "out")
    export(source, tmp_path / "out", quantization="fp16")  # and passes its own check


def test_what_llama_does_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(families.write_hf("gemma3", tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"layer kinds, .*activation"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_beyond_float16_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    source = runtimes.open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has values beyond float16"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_something_else_is_left_alone(wide: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(wide, out, check=False)
    export(wide, out, quantization="int8", check=False)  # a bundle may be replaced
    assert open_bundle(out).manifest.quantization == "int8 for the gpu"
    (out / "model.mlpackage" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        export(wide, out)
    assert (out / "model.mlpackage" / "mine.txt").read_text() == "mine"
