"""Looks for inputs that a reader does not survive, with atheris (pip install -e ".[fuzz]").

    python benchmarks/fuzz.py [--seconds N] [--targets NAME,NAME] [--json FILE] [--keep N]

Each target of tests/fuzz/targets.py runs for N seconds in a process of its own. What ends in
anything but an EdgeSpecError, takes more than 10 s or 2 GiB is a finding: its input is written to
the target's corpus, from where tests/fuzz/test_corpus.py replays it for ever. Of the inputs that
reach new code, the smallest --keep join it, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_spec.scheduler.machine import describe_machine

FOLDER = Path(__file__).parents[1] / "tests" / "fuzz"
sys.path.insert(0, str(FOLDER))

from stored import CORPUS, store  # noqa: E402

MAX_INPUT_BYTES = 16_384
MAX_INPUT_S = 10
MAX_MEMORY_MIB = 2048
MAX_KEPT_BYTES = 2048
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_PULSE = re.compile(r"^#(\d+)\s", re.MULTILINE)


def fuzz(name: str, arguments: list[str], findings: Path) -> None:
    """Runs in a process of its own and does not return; writes one input for each place that
    raises into `findings`."""
    import atheris

    with atheris.instrument_imports(include=["edge_spec", "jinja2"], enable_loader_override=False):
        import targets
    seen: set[str] = set()

    def one(data: bytes) -> None:
        try:
            targets.attempt(targets.TARGETS[name], data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            where = (
                f"{type(error).__name__} {last and last.tb_frame.f_code} {last and last.tb_lineno}"
            )
            if where not in seen:
                seen.add(where)
                kind = type(error)
                smaller = minimized(data, lambda part: raises(targets, name, part, kind))
                digest = hashlib.sha256(smaller).hexdigest()[:16]
                (findings / digest).write_bytes(smaller)
                (findings / f"{digest}.txt").write_text(f"{where}: {str(error)[:500]}\n")

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def raises(targets: Any, name: str, data: bytes, kind: type[BaseException]) -> bool:
    try:
        targets.attempt(targets.TARGETS[name], data)
    except BaseException as error:
        return type(error) is kind
    return False


def minimized(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """Leaves out parts that it fails without, the largest first."""
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def run(name: str, seconds: float, keep: int) -> dict[str, int]:
    """Executions, files in the corpus and findings of one target."""
    until = time.monotonic() + seconds
    executions, findings = 0, 0
    with TemporaryDirectory() as scratch:
        found, fresh = Path(scratch) / "found", Path(scratch) / "fresh"
        found.mkdir()
        fresh.mkdir()
        while (left := round(until - time.monotonic())) > 0:
            done = subprocess.run(
                [
                    *(sys.executable, __file__, "--one", name, str(found)),
                    *(str(fresh), str(CORPUS / name)),
                    *(f"-max_total_time={left}", f"-timeout={MAX_INPUT_S}"),
                    *(f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={MAX_MEMORY_MIB}"),
                    *(f"-artifact_prefix={found}/", "-print_final_stats=1"),
                ],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                # A panic in Rust otherwise looks for its callers, and the fuzzer's timer in that
                # stops the process for ever.
                env={**os.environ, "RUST_BACKTRACE": "0"},
            )
            counts = _EXECUTED.findall(done.stderr) or _PULSE.findall(done.stderr)
            executions += int(counts[-1]) if counts else 0
            if done.returncode != 0:
                print(
                    f"{name} ended with {done.returncode}: {done.stderr[-1000:]}", file=sys.stderr
                )
        for path in sorted(found.iterdir()):
            if path.suffix == ".txt":
                print(f"{name}: {path.read_text().strip()}", file=sys.stderr)
            elif store(name, path.read_bytes()):
                findings += 1
        small = (path for path in fresh.iterdir() if path.stat().st_size <= MAX_KEPT_BYTES)
        for path in sorted(small, key=lambda path: path.stat().st_size)[:keep]:
            store(name, path.read_bytes())
    files = len(list((CORPUS / name).iterdir()))
    return {"executions": executions, "corpus_files": files, "crashes": findings}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], sys.argv[4:], Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--targets", help="separated by commas; all without it")
    parser.add_argument("--keep", type=int, default=0, help="new inputs of each target to keep")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from targets import TARGETS

    names = options.targets.split(",") if options.targets else sorted(TARGETS)
    results = {}
    for name in names:
        results[name] = run(name, options.seconds, options.keep)
        print(f"{name}: {results[name]}", file=sys.stderr)
    total = {key: sum(result[key] for result in results.values()) for key in results[names[0]]}
    if options.json is not None:
        document = {"targets": results, "seconds": options.seconds, "machine": describe_machine()}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(
        f"{len(names)} targets, {total['executions']} inputs, {total['crashes']} new findings, "
        f"{total['corpus_files']} files in the corpus"
    )


if __name__ == "__main__":
    main()
