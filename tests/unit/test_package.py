"""The package: what it consists of, what it never does, what an import costs.

Who may import whom is held by the contracts of import-linter in pyproject.toml.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import edge_spec

ROOT = Path(__file__).parents[2]
MAPPED = ("apps", "exporters", "runtimes")  # folders at the top, imported as edge_spec.*

PUBLIC = ["Alternative", "AnswerOptions", "AsyncEngine", "ChatOptions", "Chunk", "EdgeSpecError"]
PUBLIC += ["Engine", "FinishReason"]
PUBLIC += ["Generation", "GenerationResult", "Grammar", "Origin", "PartKind"]
PUBLIC += ["SamplingParams", "Stats", "Token", "load", "load_async"]
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


def imported(path: Path) -> list[str]:
    """Modules that the file imports anywhere, inside functions too."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.append(node.module or "")
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


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


def test_mapped_folders_are_never_imported_by_their_top_level_name() -> None:
    # `import runtimes.x` would create a second copy of every class.
    for path in sources("edge_spec", *MAPPED, "benchmarks", "tests"):
        for module in imported(path):
            assert module.split(".")[0] not in MAPPED, f"{path} imports {module}"


def test_nothing_can_execute_what_it_reads() -> None:
    for path in sources("edge_spec", *MAPPED, "benchmarks"):
        for module in imported(path):
            assert module.split(".")[0] not in ("pickle", "marshal", "shelve", "dill"), path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                called = node.func
                assert not (isinstance(called, ast.Name) and called.id in ("eval", "exec")), path
                assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), path


def modules_after(statement: str) -> list[str]:
    command = [sys.executable, "-c", f"import sys; {statement}; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_importing_edge_spec_loads_no_library() -> None:
    assert not set(HEAVY) & set(modules_after("import edge_spec"))


def test_the_command_line_shows_its_help_with_typer_alone() -> None:
    assert set(HEAVY) & set(modules_after("import edge_spec.cli.main")) == {"typer"}


def test_importing_load_leaves_what_few_use_until_it_is_used() -> None:
    loaded = modules_after("from edge_spec import load")
    late = ("drafters.heads.", "drafters.draft.", "loader.head", "models.hub_download")
    late = tuple(f"edge_spec.{each}" for each in (*late, "placement.idle_process", "core.watchdog"))
    assert not [name for name in loaded if name.startswith(late)]
    assert "huggingface_hub" not in loaded and "onnxruntime" not in loaded


def test_the_public_names_are_locked_sorted_and_resolve() -> None:
    assert edge_spec.__all__ == PUBLIC == sorted(PUBLIC) == dir(edge_spec)
    for name in PUBLIC:
        assert getattr(edge_spec, name).__name__ == name
    with pytest.raises(AttributeError, match="nonesuch"):
        edge_spec.nonesuch  # noqa: B018


def test_messages_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        node.args[0].value
        for path in sources("edge_spec", *MAPPED)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "install"
        and isinstance(node.args[0], ast.Constant)
    }
    assert "grammar" in named
    assert named <= extras["optional-dependencies"].keys()
