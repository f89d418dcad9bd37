"""A matrix of processors: which widths agree on each, and whether drafts change a text there.

    python benchmarks/processors.py                                 # all that can be had here
    python benchmarks/processors.py --cpu native Haswell --case "ort int4"
    python benchmarks/processors.py --arm64 DIRECTORY               # that arm64_root.py made
    python benchmarks/processors.py --cpu Haswell --case "llamacpp Q4_0" --python PYTHON

Processors but this machine's own are emulated by qemu's user mode (apt-get install qemu-user). A
library chooses the kernels for the processor that it is shown, and emulation computes what that
processor would, some hundred times slower: nothing here is a measure of time. Prints a Markdown
table. The status is 1 where a process fails, a text differs that must not, or nothing was drafted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType
from typing import Any

from arm64_root import ROOT, SITE, python_of
from common import report
from processor_models import CASES, convert, write_small_demo

PROBE = Path(__file__).with_name("processor_probe.py")
NATIVE = "native"
# Which kernels OpenBLAS is told to take here, whatever an emulated processor can do.
_THIS_MACHINES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
USUAL_CASES = ("ort int4", "ort int8", "ort fp32", "reference")
HEAD = ("processor", "instructions", "case", "widths that agree", "noise", "by default")
TEXTS = ("texts that differ", "with `--exact`")
PROMISES = MappingProxyType(
    {
        "by_construction": "bit-identical, by construction",
        "bit_identical": "bit-identical",
        "replayed": "near ties replayed",
        "ties": "ties may differ",
    }
)


@dataclass(frozen=True)
class Processor:
    """One that qemu emulates."""

    instructions: str
    machine: str  # as platform.machine() has it
    cpu: str  # qemu's name

    @property
    def emulator(self) -> str | None:
        """The program, None where it is not installed."""
        name = f"qemu-{self.machine}"
        return shutil.which(name) or shutil.which(f"{name}-static")


PROCESSORS = MappingProxyType(
    {
        "Nehalem": Processor("SSE4.2", "x86_64", "Nehalem"),
        "SandyBridge": Processor("AVX", "x86_64", "SandyBridge"),
        "Haswell": Processor("AVX2", "x86_64", "Haswell"),
        "cortex-a72": Processor("NEON", "aarch64", "cortex-a72"),
        "neoverse-n1": Processor("NEON, dot products", "aarch64", "neoverse-n1"),
        "arm64-max": Processor("NEON, dot and matrix products, SVE2, SME", "aarch64", "max"),
    }
)


@dataclass(frozen=True)
class Interpreters:
    """Chooses the Python with which a processor runs the probe.

    own: for this machine's kind of processor. arm64: the directory of another one's, or None. code:
    a directory with this edge-spec for an interpreter in which it is not installed.
    """

    own: str
    arm64: Path | None
    code: Path

    def missing(self, name: str) -> str | None:
        """Why this processor cannot be had; None where it can."""
        if name == NATIVE:
            return None
        processor = PROCESSORS[name]
        if processor.emulator is None:
            return f"qemu-{processor.machine} is not installed"
        if processor.machine == platform.machine():
            return None
        if processor.machine != "aarch64":
            return f"needs a machine of the kind {processor.machine}"
        if self.arm64 is None:
            return "needs --arm64 DIRECTORY, made by benchmarks/arm64_root.py"
        return None

    def command(self, name: str) -> tuple[list[str], dict[str, str | None]]:
        """Returns what starts Python on a processor that is not missing, and what it changes in the
        environment; None: taken out of it."""
        here: dict[str, str | None] = {}
        if self.own != sys.executable:
            here["PYTHONPATH"] = str(self.code)
        if name == NATIVE:
            return [self.own], here
        processor = PROCESSORS[name]
        assert processor.emulator is not None
        emulated = [processor.emulator, "-cpu", processor.cpu]
        here |= dict.fromkeys(_THIS_MACHINES)
        if processor.machine == platform.machine():
            return [*emulated, self.own], here
        assert self.arm64 is not None
        path = os.pathsep.join([str(self.code), str(self.arm64 / SITE)])
        root = ["-L", str(self.arm64 / ROOT), str(python_of(self.arm64))]
        return [*emulated, *root], here | {"PYTHONPATH": path}


def link_code(folder: Path) -> Path:
    """Links this edge-spec with its runtimes, and its entry points, however it is installed."""
    package = folder / "edge_spec"
    package.mkdir(parents=True)
    for entry in _home("edge_spec").iterdir():
        (package / entry.name).symlink_to(entry)
    for mapped in ("exporters", "runtimes"):
        if not (package / mapped).exists():
            (package / mapped).symlink_to(_home(f"edge_spec.{mapped}"))
    installed = distribution("edge-spec")
    metadata = folder / f"edge_spec-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(installed.read_text(name) or "", encoding="utf-8")
    return folder


def _home(module: str) -> Path:
    return Path(next(iter(import_module(module).__path__)))


def run_probe(
    command: Sequence[str], environment: Mapping[str, str | None], timeout_s: float
) -> dict[str, Any]:
    """Returns what the probe printed, or {"failed": why}."""
    with tempfile.TemporaryDirectory() as cache:
        # Of what is found of rows, none may be another processor's.
        changed = {**os.environ, **environment, "EDGE_SPEC_CACHE": cache}
        given = {name: value for name, value in changed.items() if value is not None}
        given |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command,
                env=given,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {timeout_s:g} s"}
    if done.returncode < 0:
        return {"failed": signal.Signals(-done.returncode).name}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["without a word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    names: Sequence[str],
    models: dict[str, Path],
    interpreters: Interpreters,
    arguments: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """One result for each processor and case."""
    for name in names:
        start, environment = interpreters.command(name)
        for case, model in models.items():
            words = [str(PROBE), CASES[case][0], str(model), str(arguments.tokens)]
            print(f"{name}: {case}", file=sys.stderr, flush=True)
            found = run_probe([*start, *words], environment, arguments.timeout)
            yield {"processor": name, "case": case, **found}


def is_right(result: dict[str, Any]) -> bool:
    """Returns True where the text was what it has to be, and something was drafted."""
    if "failed" in result:
        return False
    modes = result["modes"].values()
    return all(mode["drafted"] and (not mode["differing"] or _may_differ(mode)) for mode in modes)


def _may_differ(mode: dict[str, Any]) -> bool:
    return bool(mode["promise"] == "ties")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the results as Markdown."""
    rows = [[*HEAD, *TEXTS], ["---"] * len([*HEAD, *TEXTS])]
    rows += [_row(result) for result in results]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(result: dict[str, Any]) -> list[str]:
    name = result["processor"]
    if "failed" in result:
        kind = PROCESSORS[name].instructions if name != NATIVE else ""
        return [name, kind, result["case"], f"fails: {result['failed']}", "", "", "", ""]
    kind = PROCESSORS[name].instructions if name != NATIVE else ", ".join(result["features"])
    default, exact = result["modes"]["auto"], result["modes"]["always"]
    texts = [f"{mode['differing']} of {mode['texts']}" for mode in (default, exact)]
    noise = f"{result['noise']:.1g}"
    promise = PROMISES[default["promise"]]
    return [name, kind, result["case"], shown(result["widths"]), noise, promise, *texts]


def shown(widths: Sequence[int]) -> str:
    """Shows widths such as "2 to 16", or "4, 8, 12, 16"."""
    if len(widths) > 2 and widths[-1] - widths[0] == len(widths) - 1:
        return f"{widths[0]} to {widths[-1]}"
    return ", ".join(map(str, widths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", nargs="+", choices=[NATIVE, *PROCESSORS])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=USUAL_CASES)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory, best a small one")
    parser.add_argument("--tokens", type=int, default=24, help="of each text")
    parser.add_argument("--python", default=sys.executable, help="one with other libraries")
    parser.add_argument("--arm64", type=Path, help="the directory that arm64_root.py made")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for a case")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        code = link_code(folder / "code")
        interpreters = Interpreters(arguments.python, arguments.arm64, code)
        names = []
        for name in arguments.cpu or [NATIVE, *PROCESSORS]:
            missing = interpreters.missing(name)
            if missing is None:
                names.append(name)
            else:
                print(f"{name}: left out, {missing}", file=sys.stderr)
        model = arguments.model or write_small_demo(folder / "small-demo")
        models = {case: convert(model, case, folder) for case in arguments.case}
        results = list(measure(names, models, interpreters, arguments))
    print(table(results))
    report({"results": results}, arguments.json)
    sys.exit(0 if results and all(map(is_right, results)) else 1)


if __name__ == "__main__":
    main()
