"""Opens the demo model with every runtime that is installed, answers, exports and serves.

    python .ci/answers.py gguf       # the formats to export to; ort converts to ONNX by itself

Run in an environment that has the package and some of its extras: by .ci/extras.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen, run

import edge_spec

QUESTION = "Name the capital of France."
MODULES = {"llamacpp": "llama_cpp", "openvino": "openvino", "ort": "onnxruntime"}


def answer(model: str, runtime: str) -> str:
    with edge_spec.load(model, runtime=runtime) as llm:
        text = llm.chat(QUESTION, max_tokens=8).text
    assert "Paris" in text, (model, runtime, text)
    return text


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "edge_spec", *arguments]  # not the checkout beside it


def serve() -> str:
    server = Popen(command("serve", "smollm2", "--port", "0"), stderr=PIPE, text=True)
    try:
        assert server.stderr is not None
        found = (re.search(r"http://[\d.]+:\d+", line) for line in server.stderr)
        address = next(match[0] for match in found if match)
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        asked = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=120) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    for runtime, module in MODULES.items():
        if find_spec(module):
            print(f"{runtime}: {answer('smollm2', runtime)}")
    with tempfile.TemporaryDirectory() as directory:
        for form in sys.argv[1:]:
            out = str(Path(directory) / (f"{form}.gguf" if form == "gguf" else form))
            run(command("export", "smollm2", out, "--format", form), check=True)
            if form != "coreml":  # which only macOS runs
                print(f"{form}: {answer(out, 'auto')}")
    if find_spec("fastapi"):
        print(f"serve: {serve()}")


if __name__ == "__main__":
    main()
