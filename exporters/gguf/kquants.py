"""llama.cpp's own quantizer, for the formats that choose a type for each tensor."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gguf.constants import GGMLQuantizationType, LlamaFileType

from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, MissingDependencyError

LIBRARY = "llama_cpp"
_SCRIPT = Path(__file__).with_name("llama_quantize.py")
_COUNTER = re.compile(r"\[ *(\d+)/ *(\d+)\]")
_log = logging.getLogger("edge_spec.llama.cpp")


def require_library(name: str) -> None:
    """Raises MissingDependencyError that names the quantization `name`."""
    if find_spec(LIBRARY) is None:
        raise MissingDependencyError(
            f"quantization {name} is made by llama-cpp-python, which is not installed",
            remedy='Run: pip install "edge-spec[llamacpp]", or export with --quant Q4_0.',
        )


def quantize(
    source: Path,
    target: Path,
    file_type: LlamaFileType,
    progress: Progress,
    outputs: GGMLQuantizationType | None = None,
) -> None:
    """Writes `target`; where a tensor of `source` has its type already, bit for bit. outputs: type
    of the output matrix; None: a better one than that of the others.

    In a process of its own: the library can be stopped in no other way, ends the process where
    one of its checks fails, and has one log callback for all of its users. Raises ExportError.
    """
    # -P: the modules beside the script must not be taken for libraries.
    command = [sys.executable, "-P", str(_SCRIPT), str(source), str(target), str(int(file_type))]
    command += [] if outputs is None else [str(int(outputs))]
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in filter(None, map(str.strip, process.stdout)):
                last = line
                _log.debug("%s", line)
                if counter := _COUNTER.match(line):
                    progress("Quantizing with llama.cpp", int(counter[1]) / int(counter[2]))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ExportError(
            f"llama.cpp could not quantize the model (status {process.returncode}): {last}",
            remedy="Export with --quant Q4_0 or Q8_0.",
        )
