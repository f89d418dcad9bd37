"""Writes the figures of results/ into README.md and docs/results.md.

    python benchmarks/figures.py                      # writes the pages again
    python benchmarks/figures.py FOUND.json           # what `edge-spec bench --json` printed
    python benchmarks/figures.py FOUND.json --processor "Zen 4, AVX-512 VNNI" \\
        --command "edge-spec bench coder-1.5b.gguf --peers"

These files are the one place of the speedups that pages quote: bench.json of the demo model,
bench-1.5b.json of a model that people use, beside other libraries, coder.json of that model with a
draft and with a head. The first two are the document of `edge-spec bench --json` without its single
prompts, with the day, the commit and the command. A test fails where a page says anything else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from real_models import MODELS

from edge_spec.models import source
from edge_spec.storage.atomic import atomic_file

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOUND, FOUND_LARGER = RESULTS / "bench.json", RESULTS / "bench-1.5b.json"
QUOTED = {source.DEMO: FOUND, MODELS["coder-1.5b"].file_name: FOUND_LARGER}
LARGER = "Qwen2.5-Coder 1.5B Instruct, Q4_K_M"
DEMO = "The demo model of 135M parameters"
PAIR = RESULTS / "coder.json"
PAIR_ROWS = {
    "llama-server": "llama-server, plain decoding",
    "plain": "edge-spec, plain decoding",
    "suffix": "edge-spec, suffix lookup",
    "the 0.5B as draft": "edge-spec, the 0.5B as draft",
    "the head": "edge-spec, a head trained with `distill`",
}
BEGIN = "<!-- made by benchmarks/figures.py of benchmarks/results -->\n"
END = "<!-- end of what is made -->\n"
KEPT = ("machine", "settings", "total", "categories", "sampled", "peers")

Report = Mapping[str, Any]


def read(path: Path = FOUND) -> dict[str, Any]:
    """Returns a run that all pages quote."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def keep(report: Report, command: str, commit: str, processor: str | None) -> None:
    """Makes the document of `edge-spec bench --json` the run of its model that all pages quote.
    Raises SystemExit for a model that no page quotes."""
    model = report["settings"]["model"]
    if model not in QUOTED:
        raise SystemExit(f"pages quote {' and '.join(QUOTED)}, not {model}")
    about = {"command": command, "day": datetime.now(UTC).date().isoformat(), "commit": commit}
    if processor:
        about["processor"] = processor
    found = {"about": about, **{name: report[name] for name in KEPT}}
    with atomic_file(QUOTED[model]) as file:
        file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def headline() -> str:
    """Return the best measured case as Markdown, and beside it what the demo model gains."""
    found = read(PAIR)
    figures, (measured, *_) = found["figures"], found["tables"]
    columns = measured["columns"][1:6]
    demo = read()
    equal, texts = figures["texts of ours that equal our plain decoding"].split(" of ")
    lines = [
        f"**{LARGER}**, 48 prompts, greedy, on {found['machine'].partition(';')[0]}. Tokens per "
        "second, and times llama-server's plain decoding (95 % interval):",
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name, *cells, _ in measured["rows"]:
        if name in PAIR_ROWS:
            lines.append(_row(PAIR_ROWS[name], [_times(cell) for cell in cells]))
    lines += [
        "",
        f"Output matched plain decoding in {equal} of {texts} texts. Compared with edge-spec's own "
        "plain decoding, the draft is "
        f"{figures['draft over our plain decoding']} times as fast and the head "
        f"{figures['head over our plain decoding']} times. With lookup alone, the demo "
        f"model of 135M parameters is {interval(demo['total'], 'speedup')} times as fast "
        f"({demo['about']['processor'].partition(',')[0]}). [All results](docs/results.md)",
    ]
    return "\n".join(lines) + "\n"


def _times(cell: object) -> str:
    """`48.3, 1.54 (1.4 to 1.6)` as `48.3, 1.54x (1.4 to 1.6)`; a rate alone as it is."""
    rate, comma, ratio = str(cell).partition(", ")
    number, space, bounds = ratio.partition(" ")
    return f"{rate}{comma}{number}x{space}{bounds}" if comma else rate


def tables() -> str:
    """Returns what the runs found, as Markdown."""
    demo_found = f"**{DEMO}.** {table(read())}"
    if not FOUND_LARGER.exists():
        return demo_found
    larger = read(FOUND_LARGER)
    return f"**{LARGER}.** {peers_table(larger)}\n{demo_found}"


def peers_table(report: Report) -> str:
    """Returns what a run found beside other libraries on the same file."""
    total = report["total"]
    ours = interval(total, "speedup")
    lines = [
        _machine(report),
        "",
        "| | plain, tokens/s | with speculation | ratio | edge-spec over its plain rate | over its "
        "speculation |",
        "|---|---|---|---|---|---|",
    ]
    for name, of in report["peers"].items():
        if of["plain_per_second"] is not None:
            rates = [_rate(of, "plain_per_second"), _rate(of, "predicted_per_second")]
            ratios = ("speedup", "ours_over_plain", "ours_over_predicted")
            cells = [*rates, *(interval(of, ratio) for ratio in ratios)]
            lines.append(_row(f"{name} {of['version']}", cells))
    rates = [_rate(total, "plain_per_second"), _rate(total, "predicted_per_second")]
    lines.append(_row("edge-spec", [*rates, ours, "", ""]))
    return "\n".join([*lines, "", _known(report)]) + "\n"


def table(report: Report) -> str:
    """Returns what a run found, as Markdown: machine and command, categories, and what to know."""
    total = report["total"]
    columns = {**report["categories"], "all": total}
    lines = [
        _machine(report),
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        _row("plain, tokens/s", [f"{of['plain_per_second']:.0f}" for of in columns.values()]),
        _row("edge-spec", [f"{of['predicted_per_second']:.0f}" for of in columns.values()]),
        _row("ratio", [interval(of, "speedup") for of in columns.values()]),
        "",
        _known(report),
    ]
    return "\n".join(lines) + "\n"


PAGES = {ROOT / "README.md": headline, ROOT / "docs" / "results.md": tables}


def with_tables(text: str, make: Callable[[], str] = tables) -> str:
    """Returns the page with what stands between its comments made again. Raises ValueError for a
    page without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page lacks the comments around its figures")
    return f"{before}{begin}\n{make()}\n{end}{after}"


def interval(of: Mapping[str, Any], name: str) -> str:
    """Returns a ratio with its 95 % interval, where they are known."""
    if of.get(name) is None:
        return ""
    low, high = of.get(f"{name}_low"), of.get(f"{name}_high")
    bounds = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    return f"{of[name]:.2f}{bounds}"


def _rate(of: Mapping[str, Any], name: str) -> str:
    return "" if of[name] is None else f"{of[name]:.1f}"


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _machine(report: Report) -> str:
    about, machine, settings = report["about"], report["machine"], report["settings"]
    processor = f" ({about['processor']})" if "processor" in about else ""
    package = {"ort": "onnxruntime", "llamacpp": "llama-cpp-python"}.get(settings["runtime"])
    version = machine["versions"].get(package)
    library = f", {package} {version} on the CPU" if version else ""
    return (
        f"`{about['command']}` on {machine['cores']} cores, {machine['cpu']}{processor}{library}, "
        f"{about['day']}, commit {about['commit']}: {report['total']['prompts']} prompts of our "
        f"own, greedy, at most {settings['max_tokens']} tokens, decoding alone, in turns with "
        "plain decoding, with 95 % confidence intervals. Not measured on a GPU."
    )


def _known(report: Report) -> str:
    total, sampled = report["total"], report["sampled"]
    worst = interval(total, "worst_prompt_speedup")
    said = [
        f"{total['differing_texts']} of {total['prompts']} texts differ from plain decoding's"
        f"{f', and the worst prompt is at {worst}' if worst else ''}.",
        f"{total['loop_share']:.0%} of the tokens are in loops, which are easy to draft.".replace(
            "%", " %"
        ),
    ]
    if total["loop_free_speedup"] is not None:
        said.append(
            f"Without loops, the ratio is {interval(total, 'loop_free_speedup')} over "
            f"{total['loop_free_prompts']} prompts."
        )
    if sampled:
        said.append(
            f"Sampled ({sampled['sampling']}) it is "
            f"{interval(sampled['total'], 'speedup')} over {sampled['total']['prompts']} prompts."
        )
    return " ".join(said)


def main() -> None:
    from common import machine
    from trust import write_page

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("found", type=Path, nargs="?")
    parser.add_argument("--command", default="edge-spec bench", help="that printed the file")
    parser.add_argument("--processor", help="what its name does not say")
    arguments = parser.parse_args()
    if arguments.found is not None:
        report = json.loads(arguments.found.read_text("utf-8"))
        keep(report, arguments.command, machine()["commit"], arguments.processor)
    write_pages()
    write_page()


def write_pages() -> None:
    """Write the figures of README.md and docs/results.md again; the promises are trust.py's."""
    for page, make in PAGES.items():
        made = with_tables(page.read_text("utf-8"), make)
        with atomic_file(page) as file:
            file.write_text(made, "utf-8")


if __name__ == "__main__":
    main()
