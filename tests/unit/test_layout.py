"""The shape of the repository: packages, who may import whom, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import edge_spec

ROOT = Path(__file__).parents[2]
MAPPED = ("apps", "exporters", "runtimes")  # folders at the top, imported as edge_spec.*

# Lowest first. A module may import from lower rows and its own row.
LAYERS = (
    {"errors", "architecture", "constraint", "endpoint", "grammar", "tree", "sampling", "storage"}
    | {"called_back", "context_room", "draws", "scores", "kept_file", "locks", "swap"}
    | {
        "bundle",
        "template",
        "pair_bundle",
        "pair_choices",
        "processor",
        "quiet_import",
        "snapshot_file",
        "template_budget",
        "template_nodes",
        "template_sandbox",
        "tokenizer",
    }
    | {"vocabulary"},
    {"model", "drafters.protocol"},
    {"drafters", "verify", "control", "metrics", "demo_model", "hub", "plugins", "sources"}
    | {"target", "watch"},
    {
        "anticipation",
        "cascade",
        "decoder",
        "self_speculation",
        "speculation",
        "load_options",
        "target",
    },
    {"answer_options", "asking", "drafting", "results", "pair_history", "parts", "shared"}
    | {"generation", "snapshot", "engine", "testing"},
    {
        "async_engine",
        "bench",
        "doctor",
        "draft_choice",
        "loading",
        "opening",
        "pair_export",
        "placement",
        "proof",
    }
    | {"preparation"},
    {"cli", "__main__"},
)
# Siblings of one row that do not import each other, but for these names.
SIBLINGS = {"drafters", "verify", "control", "metrics"}
ALLOWED_BETWEEN_SIBLINGS = {("control", "metrics"): {"PlainReason", "RoundStats"}}
PUBLIC = ["Alternative", "AnswerOptions", "AsyncEngine", "ChatOptions", "Chunk", "EdgeSpecError"]
PUBLIC += ["Engine", "FinishReason"]
PUBLIC += ["Generation", "GenerationResult", "Grammar", "Origin", "SamplingParams", "Stats"]
PUBLIC += ["Token", "load", "load_async"]
HEAVY = [
    "numpy",
    "onnx",
    "onnxruntime",
    "tokenizers",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "pydantic",
    "typer",
    "rich",
]


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Modules imported anywhere in the file, inside functions too, and the names taken from each.

    `from edge_spec import plugins` counts as edge_spec.plugins.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = tuple(alias.name for alias in node.names)
            module = node.module or ""
            if (ROOT / Path(*module.split("."))).is_dir():
                found += [(f"{module}.{name}", ()) for name in names]
            else:
                found.append((module, names))
    return found


def module_name(path: Path) -> str:
    """As in LAYERS: without "edge_spec.", packages by their own name."""
    parts = path.relative_to(ROOT / "edge_spec").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def group(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    module = module.removeprefix("edge_spec.")
    listed = set().union(*LAYERS)
    return module if module in listed else module.split(".")[0]


def layer(module: str) -> int:
    return next(i for i, modules in enumerate(LAYERS) if group(module) in modules)


CORE = [path for path in sources("edge_spec") if path != ROOT / "edge_spec" / "__init__.py"]


def test_the_packages_in_pyproject_are_those_on_disk() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = []
    for folder in ("edge_spec", *MAPPED):
        for init in (ROOT / folder).rglob("__init__.py"):
            dotted = ".".join(init.parent.relative_to(ROOT).parts)
            on_disk.append(dotted if folder == "edge_spec" else f"edge_spec.{dotted}")
    assert settings["packages"] == sorted(on_disk)
    expected = {f"edge_spec.{folder}": folder for folder in MAPPED}
    assert settings["package-dir"] == {"edge_spec": "edge_spec", **expected}


def test_every_folder_with_modules_is_a_package() -> None:
    for path in sources("edge_spec", *MAPPED):
        assert (path.parent / "__init__.py").exists(), path


def test_every_module_of_the_core_has_a_layer() -> None:
    listed = set().union(*LAYERS)
    unlisted = [str(path) for path in CORE if group(module_name(path)) not in listed]
    assert not unlisted


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_the_core_imports_downwards_only(path: Path) -> None:
    importer = module_name(path)
    for module, names in imports(path):
        if not module.startswith("edge_spec."):
            continue
        assert layer(module) <= layer(importer), f"{importer} imports {module}"
        pair = group(importer), group(module)
        if set(pair) <= SIBLINGS and pair[0] != pair[1]:
            assert set(names) <= ALLOWED_BETWEEN_SIBLINGS.get(pair, set()), f"{importer}: {module}"


def test_the_core_has_no_cycle_of_imports() -> None:
    graph = {
        f"edge_spec.{module_name(path)}": {module for module, _ in imports(path)} for path in CORE
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_core_finds_runtimes_exporters_and_apps_by_entry_point_only() -> None:
    for path in sources("edge_spec"):
        for module, _ in imports(path):
            assert not module.startswith(tuple(f"edge_spec.{folder}" for folder in MAPPED)), path


def test_runtimes_and_exporters_do_not_import_each_other() -> None:
    for folder, other in (("runtimes", "exporters"), ("exporters", "runtimes")):
        for path in sources(folder):
            for module, _ in imports(path):
                assert not module.startswith((f"edge_spec.{other}", "edge_spec.apps")), path


def test_no_runtime_imports_another() -> None:
    for path in sources("runtimes"):
        own = ".".join(("edge_spec", *path.relative_to(ROOT).parts[:2]))
        for module, _ in imports(path):
            assert not module.startswith("edge_spec.runtimes.") or f"{module}.".startswith(
                f"{own}."
            ), path


def test_mapped_folders_are_never_imported_by_their_top_level_name() -> None:
    # `import runtimes.x` would create a second copy of every class.
    for path in sources("edge_spec", *MAPPED, "benchmarks", "tests"):
        for module, _ in imports(path):
            assert module.split(".")[0] not in MAPPED, f"{path} imports {module}"


def test_nothing_can_execute_what_it_reads() -> None:
    for path in sources("edge_spec", *MAPPED, "benchmarks"):
        for module, _ in imports(path):
            assert module.split(".")[0] not in ("pickle", "marshal", "shelve", "dill"), path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                called = node.func
                assert not (isinstance(called, ast.Name) and called.id in ("eval", "exec")), path
                assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), path


def test_importing_edge_spec_loads_no_library() -> None:
    code = f"import sys, edge_spec; print([name for name in {HEAVY} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.strip() == "[]"


def test_the_public_names_are_locked_sorted_and_resolve() -> None:
    assert edge_spec.__all__ == PUBLIC == sorted(PUBLIC) == dir(edge_spec)
    for name in PUBLIC:
        assert getattr(edge_spec, name).__name__ == name
    with pytest.raises(AttributeError, match="nonesuch"):
        edge_spec.nonesuch  # noqa: B018
