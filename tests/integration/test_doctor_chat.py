"""`edge-spec doctor` finds chat templates that do not ask, end, or keep what was said."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from edge_spec.diagnostics.doctor.diagnose import diagnose
from edge_spec.diagnostics.doctor.report import Finding, Severity
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.bundle import Bundle
from fixtures.manifests import rewrite
from fixtures.silence import quiet

Exported = Callable[..., Bundle]
EMPTY: Mapping[str, str] = MappingProxyType({})
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASKING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template_of(turn: str, asking: str = ASKING, each: str = "messages") -> str:
    return "{% for m in " + each + " %}" + turn + "{% endfor %}" + asking


def examined(exported: Exported, tmp_path: Path, **changes: Any) -> list[Finding]:
    """What is found of a bundle whose manifest has these changes."""
    bundle = Path(shutil.copytree(exported().path, tmp_path / "bundle"))
    rewrite(bundle, **changes)
    report = diagnose(str(bundle), AskedOptions(), quiet, devices=list)
    return [each for each in report.findings if each.group == "target"]


def findings(
    exported: Exported, tmp_path: Path, template: str, named: Mapping[str, str] = EMPTY
) -> list[Finding]:
    """All that is not well with a bundle that has these templates, and which others it names."""
    found = examined(exported, tmp_path, chat_template=template, named_templates=named)
    return [each for each in found if each.level is not Severity.OK or "by name" in each.found]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for", "does not compile"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
    ],
)
def test_a_template_that_leaves_its_sandbox_or_fails_is_a_fault(
    exported: Exported, tmp_path: Path, template: str, told: str
) -> None:
    (found,) = findings(exported, tmp_path, template)
    assert (found.check, found.level) == ("chat template", Severity.FAULT)
    assert told in found.found


@pytest.mark.parametrize(
    ("template", "check", "level", "told"),
    [
        (template_of(TURN, ""), "turns", Severity.WARNING, "'<|im_start|>assistant', which begins"),
        (
            template_of("<|im_start|>{{ m.role }}\n{{ m.content }}\n\n"),
            *("turns", Severity.WARNING, "but a text in '<|im_end|>': answers may not end"),
        ),
        (
            template_of(TURN, each="messages[:1]"),
            *("turns", Severity.FAULT, "leaves out what was said"),
        ),
        (
            template_of(
                "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TURN
            ),
            *("system", Severity.WARNING, "refuses these messages: none"),
        ),
        (
            template_of("{% if m.role != 'system' %}" + TURN + "{% endif %}"),
            *("system", Severity.WARNING, "the template leaves it out"),
        ),
    ],
    ids=["no-question", "no-end", "turns-lost", "system-refused", "system-lost"],
)
def test_a_template_that_neither_asks_nor_ends_nor_keeps_what_was_said_is_told(
    exported: Exported, tmp_path: Path, template: str, check: str, level: Severity, told: str
) -> None:
    (found,) = findings(exported, tmp_path, template)
    assert (found.check, found.level) == (check, level)
    assert told in found.found and found.remedy


@pytest.mark.parametrize(
    "template",
    [
        template_of(TURN),
        template_of(TURN, "<|im_start|>assistant\n<think>\n"),  # begins the answer itself
        "{{ bos_token }}"
        + template_of(
            "{% if m.role == 'assistant' %} {{ m.content }}<|im_end|>"
            "{% else %}[INST] {{ m.content }} [/INST]{% endif %}",
            "",
        ),
    ],
    ids=["chatml", "thinking", "instructions"],
)
def test_templates_as_they_are_published_have_no_fault(
    exported: Exported, tmp_path: Path, template: str
) -> None:
    assert findings(exported, tmp_path, template) == []


def test_a_template_without_control_tokens_between_messages_is_told(
    exported: Exported, tmp_path: Path
) -> None:
    told = [
        each.found
        for each in findings(exported, tmp_path, template_of("{{ m.role }}: {{ m.content }}\n"))
        if each.check == "chat template"
    ]
    assert len(told) == 1 and "one can imitate others" in told[0]
