"""Runtimes, exporters, drafters and apps are found by entry point."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, NoReturn

import pytest

from edge_spec.core import entry_points
from edge_spec.drafters import factory
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.testing import ScriptedModel, random_logits

SETTING = DrafterContext(vocab_size=9)


def declare(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str, str]) -> None:
    """Installs only these entry points: kind, name, object."""
    declared = EntryPoints(
        EntryPoint(name, value, f"edge_spec.{kind}") for kind, name, value in points
    )
    monkeypatch.setattr(
        entry_points, "find", lambda kind: declared.select(group=f"edge_spec.{kind}")
    )


def test_the_repositorys_own_plugins_are_installed() -> None:
    assert {"ort", "reference"} <= set(entry_points.names("runtimes"))
    assert "onnx" in entry_points.names("exporters")
    assert {"suffix", "recycling", "lookahead", "jacobi"} <= set(entry_points.names("drafters"))
    assert "chat" in entry_points.names("apps")


def test_a_third_partys_plugins_are_found_and_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    point = "edge_spec.drafters.factory:suffix"
    declare(monkeypatch, ("drafters", "mine", point), ("drafters", "a", point))
    assert entry_points.names("drafters") == ["a", "mine"]
    assert isinstance(factory.load_drafters("mine", SETTING)[0], SuffixDrafter)


def test_of_two_with_one_name_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found(tuple[EntryPoint, ...]):
        """As Python 3.12 and newer give them: by name alone."""

        def __getitem__(self, name: object) -> NoReturn:
            raise KeyError(name)

    found = Found(EntryPoint("a", f"module:{value}", "edge_spec.drafters") for value in "xy")
    monkeypatch.setattr(entry_points, "find", lambda kind: found)
    assert entry_points.installed("drafters") == {"a": next(iter(found))}


def test_the_reference_runtime_loads() -> None:
    runtime = runtimes.load_runtime("reference")
    assert (runtime.name, runtime.reads) == ("reference", "checkpoint")


@pytest.mark.parametrize(
    ("installed", "formats", "expected"),
    [
        (("onnxruntime", "llama_cpp"), None, "llamacpp"),
        (("onnxruntime",), None, "ort"),
        (("llama_cpp",), None, "llamacpp"),
        ((), None, "llamacpp"),
        (("onnxruntime", "llama_cpp"), {"gguf"}, "llamacpp"),
        (("onnxruntime",), {"gguf", "coreml"}, "llamacpp"),  # says what to install
        (("onnxruntime", "coremltools"), {"coreml"}, "coreml"),
        (("llama_cpp",), {"coreml"}, "coreml"),  # says what to install
        (("coremltools",), None, "llamacpp"),
        (("coreai",), {"coreai"}, "coreai"),
    ],
)
def test_auto_takes_an_installed_runtime_that_reads_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    formats: set[str] | None,
    expected: str,
) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda module: module in installed or None)
    assert runtimes.auto_runtime(formats) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("none", []),
        ("auto", ["suffix"]),
        ("suffix", ["suffix"]),
        (" jacobi ,suffix", ["jacobi", "suffix"]),
        ("recycling,lookahead", ["recycling", "lookahead"]),
    ],
)
def test_drafters_are_chosen_by_names(chosen: str, expected: list[str]) -> None:
    drafters = factory.load_drafters(chosen, SETTING)
    assert [drafter.name for drafter in drafters] == expected
    assert factory.load_drafters(chosen, SETTING)[:1] != drafters[:1] or not expected  # new ones


def test_a_drafter_named_twice_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="twice"):
        factory.load_drafters("suffix, suffix", SETTING)


@pytest.mark.parametrize("name", ["corpus", "answers", "draft-model"])
def test_a_drafter_that_lacks_something_says_what(name: str) -> None:
    with pytest.raises(UsageError, match=f"the drafter {name} needs a"):
        factory.load_drafters(f"suffix,{name}", SETTING)


@pytest.mark.parametrize("chosen", ["nonesuch", "suffix,nonesuch", "", "suffix,", "AUTO"])
def test_an_unknown_drafter_is_a_usage_error_that_lists_the_installed(chosen: str) -> None:
    with pytest.raises(UsageError, match=r"no drafter called.*Installed: .*suffix"):
        factory.load_drafters(chosen, SETTING)


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (runtimes.load_runtime, "runtime"),
        (runtimes.load_exporter, "exporter"),
        (entry_points.load_app, "app"),
    ],
)
def test_an_unknown_plugin_is_a_usage_error_of_its_kind(load: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=f"no {kind} called 'nonesuch'"):
        load("nonesuch")


def test_nothing_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch)
    with pytest.raises(UsageError, match="Installed: none"):
        runtimes.load_runtime("ort")


def test_a_plugin_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, ("runtimes", "heavy", "no_such_library.runtime:Runtime"))
    with pytest.raises(MissingDependencyError, match=r"'heavy'.*no_such_library.*pip install"):
        runtimes.load_runtime("heavy")


def test_a_runtime_that_does_not_inherit_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare(monkeypatch, ("runtimes", "mine", "types:SimpleNamespace"))
    with pytest.raises(UsageError, match="the runtime mine is of a class that does not inherit"):
        runtimes.load_runtime("mine")


def test_a_draft_is_asked_for_by_name_or_by_being_there() -> None:
    draft = Draft(ScriptedModel(random_logits(9), 9), 9)
    for chosen, expected in (
        ("auto", ["suffix", "cascade"]),
        ("cascade", ["cascade"]),
        ("draft-model", ["draft-model"]),
        ("suffix, draft-model", ["suffix", "draft-model"]),
        ("suffix", ["suffix"]),
        ("none", []),
    ):
        loaded = factory.load_drafters(chosen, replace(SETTING, drafts=[draft]))
        assert [drafter.name for drafter in loaded] == expected


@pytest.mark.parametrize("chosen", ["none", "suffix", "suffix,draft-models"])
def test_a_draft_that_would_not_be_used_is_refused_before_anything_is_opened(chosen: str) -> None:
    """Neither model exists; the first use of the target might be a long conversion."""
    with pytest.raises(UsageError, match="would not be used by --drafter"):
        options = LoadOptions(runtime="reference", drafter=chosen, draft="no-draft.gguf")
        load_engine("no-target.gguf", options, lambda what, fraction: None)
