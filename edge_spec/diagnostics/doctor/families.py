"""States what runs where: each family, each runtime, and the test that shows it.

A number is the largest difference of logits that was measured, of tiny models all of whose
parameters are random, in float32: from transformers on the reference and on ort, and from the
reference on llama.cpp. docs/models.md has this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_spec.diagnostics.doctor.finding import Finding, note, ok
from edge_spec.diagnostics.doctor.subject import Subject
from edge_spec.diagnostics.report_files import markdown_table

FAMILIES = "tests/integration/test_families.py"
TRANSLATORS = "test_translators.py"
RUNTIMES = ("reference", "ort", "coreml", "llamacpp", "optimum")
Shown = str | None  # a difference, or in what form it runs; None: not shown


@dataclass(frozen=True)
class Shows:
    """States what tests show of one family."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    architectures: tuple[str, ...]  # of GGUF
    runs: tuple[Shown, ...]  # on each of RUNTIMES
    test: str = FAMILIES

    def on(self, runtime: str) -> Shown:
        return self.runs[RUNTIMES.index(runtime)]


def _own(
    reference: str, ort: str, llamacpp: Shown = None, optimum: Shown = None
) -> tuple[Shown, ...]:
    """Describes a family that has what Core ML is not given."""
    return (reference, ort, None, llamacpp, optimum)


TABLE = (
    Shows(
        "Llama, SmolLM2, Mistral",
        ("llama", "mistral"),
        ("llama",),
        ("2.1e-5", "2.3e-5", "yes", "1.8e-5", None),
        "tests/integration/test_reference.py, test_onnx_export.py, test_coreml_export.py, "
        "test_gguf_export.py",
    ),
    Shows(
        "Qwen 2, 2.5, 3",
        ("qwen2", "qwen3"),
        ("qwen2", "qwen3"),
        ("1.3e-5", "9.6e-6", "yes", "1.6e-5", None),
        "tests/integration/test_reference.py, test_onnx_export.py, test_coreml_export.py, "
        "test_gguf_export.py",
    ),
    Shows(
        "MiMo 7B, Qwen 2 with a head of its own",
        ("mimo",),
        (),
        ("yes", "yes", None, "yes", None),
        "tests/integration/test_mtp_heads.py",
    ),
    Shows("Gemma 2", ("gemma2",), ("gemma2",), _own("1.3e-5", "1.0e-5", "3.5e-4")),
    Shows(
        "Gemma 3, its text model",
        ("gemma3_text", "gemma3"),
        ("gemma3",),
        _own("3.2e-5", "2.6e-5", "3.8e-4", "4e-6"),
        f"{FAMILIES}, test_optimum_export.py",
    ),
    Shows(
        "Gemma 4, its text model, with and without experts",
        ("gemma4_text", "gemma4"),
        ("gemma4",),
        _own("3.5e-5", "2.2e-5", "3.1e-3"),
        f"{FAMILIES}, test_gemma4.py",
    ),
    Shows("Granite 3", ("granite",), ("granite",), _own("4.8e-7", "5.7e-7", "4.2e-7")),
    Shows(
        "Granite 4 without recurrent layers and experts",
        ("granitemoehybrid",),
        (),
        _own("1.7e-6", "1.8e-6"),
    ),
    Shows("SmolLM3", ("smollm3",), ("smollm3",), _own("1.7e-6", "1.3e-6", "1.2e-6")),
    Shows("MiniCPM 1, 2", ("minicpm",), ("minicpm",), _own("4.2e-7", "4.2e-7", "3.7e-7")),
    Shows("Phi-3, 3.5, 4-mini", ("phi3",), ("phi3",), _own("1.8e-6", "1.2e-6", "1.3e-6")),
    Shows("OLMo 2", ("olmo2",), ("olmo2",), _own("2.5e-6", "2.4e-6", "2.0e-6")),
    Shows("OLMo 3", ("olmo3",), ("olmo2",), _own("1.9e-6", "2.0e-6", "2.1e-6")),
    Shows("EXAONE 4", ("exaone4",), ("exaone4",), _own("2.6e-6", "2.1e-6", "4.9e-6")),
    Shows(
        "Hunyuan, dense",
        ("hunyuan_v1_dense",),
        ("hunyuan-dense",),
        _own("1.1e-6", "1.1e-6", "1.1e-6"),
    ),
    Shows(
        "Ministral 3, text models of Mistral 3",
        ("ministral3", "mistral3"),
        ("mistral3",),
        _own("1.2e-6", "1.3e-6", "1.2e-6"),
    ),
    Shows("Qwen 3 with experts", ("qwen3_moe",), ("qwen3moe",), _own("1.4e-6", "1.2e-6", "1.2e-6")),
    Shows("gpt-oss", ("gpt_oss",), ("gpt-oss",), _own("1.7e-6", "1.3e-6", "1.5e-6")),
    Shows(
        "LFM2, dense",
        ("lfm2",),
        ("lfm2",),
        _own("4.5e-6", "3.1e-6", "3.6e-6, chains"),
        f"{FAMILIES}, test_llamacpp_hybrids.py",
    ),
    Shows(
        "LFM2 with experts",
        ("lfm2_moe",),
        ("lfm2moe",),
        _own("3.4e-6", "3.2e-6", "2.4e-6, chains"),
        f"{FAMILIES}, test_llamacpp_hybrids.py",
    ),
    Shows(
        "Qwen 3.5, dense",
        (),
        ("qwen35",),
        (None, None, None, "5.9e-6, chains", None),
        "tests/integration/test_llamacpp_hybrids.py, test_qwen35_mtp.py",
    ),
    Shows(
        "Qwen 3.5 with experts",
        (),
        ("qwen35moe",),
        (None, None, None, "3.4e-6, chains", None),
        "tests/integration/test_llamacpp_hybrids.py, test_qwen35_mtp.py",
    ),
    Shows("T5, T5 1.1, Flan-T5", ("t5",), (), _own("5.1e-6", "3.3e-6")),
    Shows("BART", ("bart",), (), _own("1.4e-6", "1.1e-6")),
    Shows("Marian", ("marian",), (), _own("7.6e-6", "7.6e-6")),
    Shows(
        "mBART, mBART-50", ("mbart",), (), _own("9.5e-7", "1.1e-6"), f"{FAMILIES}, {TRANSLATORS}"
    ),
    Shows("Pegasus", ("pegasus",), (), _own("1.0e-6", "9.5e-7")),
    Shows(
        "M2M-100, NLLB", ("m2m_100",), (), _own("9.5e-7", "9.5e-7"), f"{FAMILIES}, {TRANSLATORS}"
    ),
)


def markdown() -> str:
    """The table of docs/models.md."""
    head = ["family", "model_type", "GGUF", *RUNTIMES, "shown by"]
    rows = []
    for each in TABLE:
        names = (", ".join(names) or "-" for names in (each.model_types, each.architectures))
        shown = (on or "-" for on in each.runs)
        rows.append([each.name, *names, *shown, each.test.removeprefix("tests/integration/")])
    return "\n".join(markdown_table(head, rows))


def check_family(subject: Subject) -> Iterator[Finding]:
    """Says where tests show that models like this one run."""
    for role, variants in subject.roles.items():
        if variants[0].is_other:
            continue
        name = variants[0].config.architecture
        known = next(
            (each for each in TABLE if name in (*each.model_types, *each.architectures)), None
        )
        if known is None:
            found = f"no test of edge-spec has a model of {name}"
            yield note("family", found, "Hold it against the original: edge-spec verify.").of(role)
            continue
        places = [
            place if on == "yes" else f"{place} ({on})"
            for place, on in zip(RUNTIMES, known.runs, strict=True)
            if on is not None
        ]
        yield ok("family", f"{known.name}, shown on {', '.join(places)}").of(role)
