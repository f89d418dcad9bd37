"""Runs every proof and writes the table of docs/results.md: each promise, its test, last figures.

    python benchmarks/trust.py                       # all of them: hours, most of it the long run
    python benchmarks/trust.py --only exact-ort kills  # again, the others as they were
    python benchmarks/trust.py --found soak=soak.json  # the long run was made before
    python benchmarks/trust.py --only                # only writes the table again

What each proof found is kept in docs/trust.json, with the commit, the machine and the day it was
run, and the speedup in results/bench.json, which README quotes, too (figures.py). The table is made
from these files alone, and a test holds it against them. Exit status 1 where a promise was broken:
the figures are written all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import figures
from common import machine

from edge_spec.storage.atomic import atomic_file

HERE = Path(__file__).parent
RATES = "rates"
RECORD = HERE.parent / "docs" / "trust.json"
PAGE = HERE.parent / "docs" / "results.md"
BEGIN, END = "<!-- table: benchmarks/trust.py -->\n", "<!-- end of table -->\n"
# By which a median of the interleaved ratios may be below 1 on a machine that others use, too.
TOLERANCE = 0.03

Found = dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """command: words after the interpreter; `{prompts}` and `{json}` are filled in. It
    writes a JSON document to `{json}`, or to stdout where it does not say so."""

    promise: str
    command: str
    figures: Callable[[Found], str]
    holds: Callable[[Found], bool]
    held_by: str  # tests that run with every change

    @property
    def shown(self) -> str:
        """The command as a user writes it."""
        words = self.command.removeprefix("-m edge_spec ")
        program = "edge-spec" if words != self.command else "python"
        return f"{program} {words}".removesuffix(" --json {json}").removesuffix(" --json")


def _verified(found: Found) -> str:
    greedy, sampling = found["greedy"], found["sampling"]
    text = (
        f"{greedy['num_prompts']} prompts, {greedy['num_tokens']} tokens: "
        f"{greedy['num_differing_prompts']} differ, {greedy['near_ties']} near ties"
    )
    if sampling is None:
        return text
    return (
        f"{text}; {sampling['num_draws']:,} texts drawn: p at most {sampling['p_value']:.2g}, "
        f"total variation {sampling['total_variation']:.3f} (bound "
        f"{sampling['total_variation_bound']:.3f})"
    )


def _exact(found: Found) -> str:
    return (
        f"{found['num_prompts']} prompts, {found['num_tokens']:,} tokens, "
        f"{found['num_accepted']:,} accepted draft tokens: {found['modes']['always']['differing']} "
        f"differ ({found['modes']['auto']['differing']} by default, "
        f"{found['modes']['ties']['differing']} with `--lossless ties`); plain steps at "
        f"{found['modes']['always']['plain_over_fastest']['total']:.2f} of the fastest"
    )


def _rates(found: Found) -> str:
    total = found["total"]
    return (
        f"{total['prompts']} prompts: {figures.interval(total, 'speedup')} times plain decoding; "
        f"the worst prompt {figures.interval(total, 'worst_prompt_speedup')}; "
        f"{total['differing_texts']} texts differ"
    )


def _faults(found: Found) -> str:
    kinds = ", ".join(f"{each['injected']} {kind}" for kind, each in found["by_kind"].items())
    return f"{found['injected']:,} injected, {found['survived']:,} survived ({kinds})"


def _kills(found: Found) -> str:
    operations = ", ".join(found["by_operation"])
    return (
        f"{found['kills']:,} kills in {found['rounds']:,} rounds, {found['misloads']} misloads "
        f"({operations})"
    )


def _fuzz(found: Found) -> str:
    targets = found["targets"].values()
    executions = sum(each["executions"] for each in targets)
    crashes = sum(each["crashes"] for each in targets)
    files = sum(each["corpus_files"] for each in targets)
    return (
        f"{len(targets)} targets, {executions:,} inputs, {crashes} findings; {files} files in the "
        "corpus that every run of the tests replays"
    )


def _soak(found: Found) -> str:
    return (
        f"{found['minutes']:.0f} minutes, {found['requests']:,} requests: {found['errors']} "
        f"unexpected errors, {found['differing']} answers differ; memory in the second half "
        f"{found['memory_growth']:+.1%}, handles {found['handles_start']} to {found['handles_end']}"
    )


def _exact_on(runtime: str) -> Proof:
    return Proof(
        f"`--exact` on {runtime}: bit-identical to plain decoding in the same mode",
        f"benchmarks/exact.py --runtime {runtime} --threads 1 --tokens 32 "
        "--prompts {prompts} --json {json}",
        _exact,
        lambda found: found["modes"]["always"]["differing"] == 0 and found["num_accepted"] > 0,
        "tests/unit/scheduler/test_exact_replay.py, tests/e2e/test_lossless.py",
    )


def _verify_on(runtime: str) -> Proof:
    return Proof(
        f"Lossless on {runtime}: greedy text is the plain one, sampled text has its distribution",
        f"-m edge_spec verify --runtime {runtime} --threads 1 --json",
        _verified,
        lambda found: found["verdict"] == "pass",
        "tests/unit/core/verify/test_sampled_exact.py, tests/e2e/test_drafters.py",
    )


PROOFS: dict[str, Proof] = {
    "verify-ort": _verify_on("ort"),
    "verify-llamacpp": _verify_on("llamacpp"),
    "verify-pair": Proof(
        "Lossless with a draft that is sampled, in another library",
        "-m edge_spec verify --threads 1 --draft smollm2 --draft-runtime llamacpp "
        "--draft-threads 1 --drafter draft-model --count 6 --draws 3000 --json",
        _verified,
        lambda found: found["verdict"] == "pass",
        "tests/unit/core/verify/test_sampled_exact.py, "
        "tests/unit/core/verify/test_sampled_distribution.py",
    ),
    "exact-ort": _exact_on("ort"),
    "exact-llamacpp": _exact_on("llamacpp"),
    RATES: Proof(
        f"Never slower than plain decoding (an interval that begins above {1 - TOLERANCE} passes)",
        "-m edge_spec bench --repeat 2 --json",
        _rates,
        lambda found: found["total"]["speedup_low"] > 1 - TOLERANCE,
        "tests/unit/scheduler/test_adaptive.py",
    ),
    "faults": Proof(
        "A drafter's fault changes no token; a target's fault loses nothing that was written",
        "benchmarks/faults.py --tokens 10 --json {json}",
        _faults,
        lambda found: found["injected"] == found["survived"],
        "tests/unit/testing/test_faults.py",
    ),
    "kills": Proof(
        "A kill at any moment leaves the old file or the new one",
        "benchmarks/kills.py --rounds 500 --json {json}",
        _kills,
        lambda found: found["misloads"] == 0,
        "tests/integration/test_kills.py",
    ),
    "fuzz": Proof(
        "Hostile files are refused in one line",
        "benchmarks/fuzz.py --seconds 20 --json {json}",
        _fuzz,
        lambda found: not sum(each["crashes"] for each in found["targets"].values()),
        "tests/fuzz/test_corpus.py",
    ),
    "soak": Proof(
        "Mixed requests at the context's limit leave memory and handles flat",
        "benchmarks/soak.py --minutes 120 --json {json}",
        _soak,
        lambda found: not found["errors"] and not found["differing"] and found["passed"],
        "tests/integration/test_ort_session.py, tests/unit/apps/chat/test_context_room.py",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="; ".join(PROOFS))
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--found", nargs="*", default=[], metavar="NAME=FILE")
    arguments = parser.parse_args()
    record = read_record()
    chosen = list(PROOFS) if arguments.only is None else arguments.only
    for given in arguments.found:
        name, _, path = given.partition("=")
        _keep(record, name, json.loads(Path(path).read_text("utf-8")), commit="unknown")
        chosen = [each for each in chosen if each != name]
    for name in chosen:
        print(f"{name}: {PROOFS[name].shown.format(prompts=arguments.prompts)}", flush=True)
        _keep(record, name, _run(PROOFS[name], arguments.prompts), machine()["commit"])
    write_page()
    broken = [name for name in PROOFS if name in record and not record[name]["holds"]]
    if broken:
        sys.exit(f"broken: {', '.join(broken)}")


def read_record() -> dict[str, Any]:
    """Returns what each proof found last, by its name."""
    record: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    found = figures.read()
    return record | {RATES: _kept(PROOFS[RATES], found, found["about"])}


def write_page() -> None:
    """Writes the table of docs/results.md again."""
    page = with_table(PAGE.read_text("utf-8"), read_record())
    with atomic_file(PAGE) as file:
        file.write_text(page, "utf-8")


def _run(proof: Proof, prompts: Path) -> Found:
    """A proof that fails writes its document all the same."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = proof.command.format(prompts=prompts.resolve(), json=out).split()
        done = subprocess.run(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
            check=False,
        )
        found: Found = json.loads(out.read_text("utf-8") if out.exists() else done.stdout)
    return found


def _keep(record: dict[str, Any], name: str, found: Found, commit: str) -> None:
    """Written at once: the next proof may take an hour. commit: where the document does not say."""
    proof = PROOFS[name]
    about = {"commit": found["machine"].get("commit", commit)}
    about["day"] = datetime.now(UTC).date().isoformat()
    record[name] = _kept(proof, found, about)
    print(f"{name}: {record[name]['figures']}", flush=True)
    if name == RATES:
        figures.keep(found, proof.shown, about["commit"], processor=None)
        figures.write_pages()
        return
    kept = {each: record[each] for each in record if each != RATES}
    with atomic_file(RECORD) as file:
        file.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


def _kept(proof: Proof, found: Found, about: dict[str, Any]) -> dict[str, Any]:
    """Returns what the table says of one proof."""
    return {
        "figures": proof.figures(found),
        "holds": proof.holds(found),
        **{key: about[key] for key in ("day", "commit")},
        **{key: found["machine"][key] for key in ("cpu", "cores")},
    }


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with its table made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| promise | how to see it yourself | last figures | held by |", "|---|---|---|---|"]
    lines += [_row(proof, record.get(name)) for name, proof in PROOFS.items()]
    lines += ["", _machines(record)]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def _machines(record: dict[str, Any]) -> str:
    ran: dict[str, list[str]] = {}
    for name in PROOFS.keys() & record.keys():
        ran.setdefault(f"{record[name]['cores']} cores, {record[name]['cpu']}", []).append(name)
    rows = {
        on: f" ({', '.join(sorted(names))})" if len(ran) > 1 else "" for on, names in ran.items()
    }
    return f"Run on: {'; '.join(on + rows[on] for on in sorted(ran))}. Not measured on a GPU."


def _row(proof: Proof, kept: dict[str, Any] | None) -> str:
    tests = ", ".join(f"`{name}`" for name in proof.held_by.split(", "))
    shown = proof.shown.format(prompts="FILE", json="FILE")
    if kept is None:
        return f"| {proof.promise} | `{shown}` | not measured | {tests} |"
    verdict = "" if kept["holds"] else "**broken**: "
    ran = f"{kept['day']}, commit {kept['commit']}"
    return f"| {proof.promise} | `{shown}` | {verdict}{kept['figures']} ({ran}) | {tests} |"


if __name__ == "__main__":
    main()
