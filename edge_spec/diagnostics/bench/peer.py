"""Another library, decoding in a process of its own: `PYTHON peer.py NAME`.

Speaks JSON lines over stdin and stdout. First `{"model", "lookup", "threads", "context",
"stop_ids", "program"}`, answered by `{"version", "settings"}`; then for each
`{"prompt", "max_tokens"}` an answer `{"tokens", "num_tokens", "seconds"}`, with `rounds`, `draft_n`
and `draft_n_accepted` where the library tells. Where something is wrong the answer is `{"error"}`,
with `"missing": true` where it is that the library is not installed.

num_tokens and seconds are of decoding alone: from the first token of the answer, which is of the
prompt's pass, to the last. Needs nothing but the library, so that it also runs with a Python where
edge-spec is not installed.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

Job = dict[str, Any]
Answer = dict[str, Any]
Decode = Callable[[list[int], int], Answer]
_SERVER_START_S = 300.0


def open_llamacpp(job: Job) -> tuple[str, str, Decode]:
    """llama.cpp through edge-spec's own runtime, plain."""
    from edge_spec.loader import load_engine
    from edge_spec.models.options import LoadOptions

    options = LoadOptions(
        runtime="llamacpp",
        drafter="none",
        threads=job["threads"],
        context_length=job["context"],
    )
    engine = load_engine(job["model"], options, lambda what, fraction: None)

    def decode(prompt: list[int], max_tokens: int) -> Answer:
        result = engine.generate(prompt, max_tokens=max_tokens)
        stats = result.stats
        return {
            "tokens": [token.id for token in result.tokens],
            "num_tokens": stats.predicted_n,
            "seconds": stats.predicted_ms / 1e3,
        }

    return version("llama-cpp-python"), f"threads: {job['threads']}", decode


def open_llama_cpp_python(job: Job) -> tuple[str, str, Decode]:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    class Counting(LlamaPromptLookupDecoding):
        calls = draft_tokens = 0

        def __call__(self, input_ids: Any, /, **options: Any) -> Any:
            found = super().__call__(input_ids, **options)
            self.calls += 1
            self.draft_tokens += len(found)
            return found

    # Its README advises 2 drafts on a CPU.
    lookup = Counting(max_ngram_size=2, num_pred_tokens=2) if job["lookup"] else None
    model = llama_cpp.Llama(
        job["model"],
        n_ctx=job["context"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        draft_model=lookup,
        verbose=False,
    )

    def decode(prompt: list[int], max_tokens: int) -> Answer:
        before = (lookup.calls, lookup.draft_tokens) if lookup else (0, 0)
        answer = _timed(model.generate(prompt, temp=0.0), job["stop_ids"], max_tokens)
        if lookup is not None and lookup.calls > before[0]:
            rounds = lookup.calls - before[0]
            answer |= {
                "rounds": rounds,
                "draft_n": lookup.draft_tokens - before[1],
                "draft_n_accepted": answer["num_tokens"] - rounds,
            }
        return answer

    settings = "LlamaPromptLookupDecoding, 2 draft tokens, " if lookup else ""
    return llama_cpp.__version__, f"{settings}threads: {job['threads']}", decode


def open_onnxruntime_genai(job: Job) -> tuple[str, str, Decode]:
    import onnxruntime_genai as library

    config = library.Config(job["model"])
    session_options = {"intra_op_num_threads": job["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session_options}}}))
    model = library.Model(config)
    params = library.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=job["context"])
    if job["lookup"]:
        params.set_speculative_options(ngram_size=2, max_draft_tokens=4)

    def decode(prompt: list[int], max_tokens: int) -> Answer:
        generator = library.Generator(model, params)
        generator.append_tokens(prompt)

        def tokens() -> Iterator[int]:
            while not generator.is_done():
                generator.generate_next_token()
                yield int(generator.get_next_tokens()[0])

        answer = _timed(tokens(), job["stop_ids"], max_tokens)
        if job["lookup"]:
            counts = generator.get_speculative_stats()
            answer |= {
                "rounds": counts["rounds"] + counts["standard_fallback_steps"],
                "draft_n": counts["draft_tokens_proposed"],
                "draft_n_accepted": counts["draft_tokens_accepted"],
            }
        return answer

    settings = "n-gram speculation, 4 draft tokens, " if job["lookup"] else ""
    return library.__version__, f"{settings}threads: {job['threads']}", decode


def open_openvino_genai(job: Job) -> tuple[str, str, Decode]:
    # Without this module openvino sends no event on import (runtimes/openvino/library.py).
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import numpy as np
    import openvino
    import openvino_genai as library

    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job["threads"]}
    config = library.GenerationConfig()
    config.do_sample = False
    config.apply_chat_template = False
    config.stop_token_ids = set(job["stop_ids"])
    if job["lookup"]:
        properties["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = 5, 3  # of its own examples
    pipeline = library.LLMPipeline(job["model"], "CPU", **properties)

    def decode(prompt: list[int], max_tokens: int) -> Answer:
        config.max_new_tokens = max_tokens
        ids = np.array([prompt], np.int64)
        inputs = library.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        metrics, tokens = result.perf_metrics, result.tokens[0]
        taken_ms = metrics.get_generate_duration().mean - metrics.get_ttft().mean
        return {"tokens": tokens, "num_tokens": len(tokens) - 1, "seconds": taken_ms / 1e3}

    settings = "prompt lookup, 5 draft tokens, " if job["lookup"] else ""
    return version("openvino-genai"), f"{settings}threads: {job['threads']}", decode


def open_llama_server(job: Job) -> tuple[str, str, Decode]:
    """llama.cpp's server on a port of this machine, which is told tokens, with one slot."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(job["threads"])
    own = ["--spec-default"] if job["lookup"] else []
    command = [job["program"], "-m", job["model"], "-c", str(job["context"]), "-np", "1", *own]
    command += ["-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", str(port)]
    said = subprocess.run(
        [job["program"], "--version"], capture_output=True, text=True, check=False
    )
    found = re.search(r"version: (.+)", said.stdout + said.stderr)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(server.wait)
    atexit.register(server.kill)  # which comes first
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + _SERVER_START_S
    while not _is_ready(url):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{job['program']} did not start")
        time.sleep(0.05)

    def decode(prompt: list[int], max_tokens: int) -> Answer:
        asked = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0}
        body = json.dumps({**asked, "cache_prompt": False, "return_tokens": True}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/completion", body, headers)
        ) as told:
            answer = json.load(told)
        # predicted_ms begins with the first token of the answer.
        timings, count = answer["timings"], answer["timings"]["predicted_n"] - 1
        drafted = {name: timings.get(name, 0) for name in ("draft_n", "draft_n_accepted")}
        if job["lookup"]:
            drafted["rounds"] = count - drafted["draft_n_accepted"]
        seconds = timings["predicted_ms"] / 1e3
        return {"tokens": answer["tokens"], "num_tokens": count, "seconds": seconds, **drafted}

    settings = " ".join([*own, f"threads: {threads}"])
    return found[1].strip() if found else "unknown", settings, decode


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except OSError:  # refused, or 503 while it loads
        return False


def _timed(tokens: Iterator[int], stop_ids: list[int], max_tokens: int) -> Answer:
    found: list[int] = []
    first_s = last_s = 0.0
    for token in tokens:
        last_s = time.perf_counter()
        first_s = first_s or last_s
        found.append(token)
        if token in stop_ids or len(found) >= max_tokens:
            break
    return {"tokens": found, "num_tokens": len(found) - 1, "seconds": last_s - first_s}


OPENERS = {
    "llamacpp": open_llamacpp,
    "llama-cpp-python": open_llama_cpp_python,
    "llama-server": open_llama_server,
    "onnxruntime-genai": open_onnxruntime_genai,
    "openvino-genai": open_openvino_genai,
}


def main() -> None:
    # Libraries write to stdout as they please; the answers keep it for themselves.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        library_version, settings, decode = OPENERS[sys.argv[1]](json.loads(sys.stdin.readline()))
        tell({"version": library_version, "settings": settings})
        for line in sys.stdin:
            question = json.loads(line)
            tell(decode(question["prompt"], question["max_tokens"]))
    except ImportError as error:
        tell({"error": str(error), "missing": True})
    except Exception as error:  # whatever a library raises, its user hears of it
        tell({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
