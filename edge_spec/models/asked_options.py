"""The one declaration of each option that a model is opened with.

From it are made the arguments of `edge_spec.load`, the options of the command line and the table in
docs/cli.md; the stages of the loader read its fields. Nothing heavy is imported here: every
`--help` passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_spec.drafters.jacobi import JacobiInit
from edge_spec.exactness.sharing import LosslessMode
from edge_spec.models.device_names import DraftOverlap
from edge_spec.models.option import model_option, option

if TYPE_CHECKING:
    from edge_spec.core.model import Progress

LLAMACPP = "llama.cpp"
_LLAMACPP = ("llamacpp",)
ENDPOINT = "HOST:PORT"
RPC_HELP = "A server of llama.cpp whose devices are used, too; may be repeated."
MODEL_HELP = (
    "A GGUF file, a Hugging Face directory, a bundle or pair bundle, hf:org/name[:file], or "
    "smollm2."
)


@dataclass(frozen=True, kw_only=True)
class AskedPlace:
    """Says where models run, and how their runtimes open them."""

    runtime: str = model_option(
        "auto",
        "auto, or an installed runtime: ort, llamacpp, openvino, coreml, reference.",
        more="[models.md](models.md#what-runs-it) says what `auto` takes. `llamacpp` "
        "reads GGUF files ([gguf.md](gguf.md)), `openvino` is Intel's "
        "([devices.md](devices.md#openvino)), `coreml` needs macOS 15, `reference` is numpy: "
        "slow, exact.",
        is_place=True,
        also=("backend", "engine"),
    )
    device: str | None = model_option(
        None,
        "Where the model runs: names from edge-spec devices, joined by commas.",
        more="Such as `cpu` or `cuda0`: [devices.md](devices.md).",
        is_place=True,
        also=("device_map", "main_gpu"),
    )
    threads: int | None = model_option(
        None, "CPU threads of the model.", is_place=True, also=("n_threads", "num_threads")
    )
    context_length: int | None = model_option(
        None,
        "Tokens of context, if not the model's own.",
        flag="--context",
        also=("n_ctx", "num_ctx", "ctx_size", "context_size", "max_seq_len", "max_model_len"),
    )
    plan: str | Path | None = model_option(
        None,
        "A file of edge-spec plan: where models run, who drafts.",
        read_as=Path | None,
        more="Without one, that of the cache decides what is left to `auto`: "
        "[plan.md](plan.md#pinning-a-plan).",
    )
    draft_runtime: str = model_option("auto", "The draft's runtime.", is_place=True)
    draft_device: str | None = model_option(None, "Where the draft runs.", is_place=True)
    draft_threads: int | None = model_option(
        None, "CPU threads of the draft, if not the model's.", is_place=True
    )
    gpu_layers: int | str | None = option(
        None,
        "Layers that leave the CPU: a number, or auto, as many as fit.",
        LLAMACPP,
        metavar="N",
        read_as=str | None,
        more="[gguf.md](gguf.md).",
        runtimes=_LLAMACPP,
        also=("n_gpu_layers", "num_gpu_layers", "num_gpu", "ngl"),
    )
    kv_type: str | None = option(
        None,
        "How the cache is stored: f16, f32, q8_0, q4_0.",
        LLAMACPP,
        runtimes=_LLAMACPP,
        also=("type_k", "type_v", "cache_type_k", "cache_type_v", "kv_cache_type"),
    )
    mmap: bool | None = option(
        None, "Leave the weights in their file.", LLAMACPP, runtimes=_LLAMACPP, also=("use_mmap",)
    )
    flash_attention: bool | None = option(
        None,
        "Attend in blocks; on unless turned off.",
        LLAMACPP,
        runtimes=_LLAMACPP,
        also=("flash_attn", "attn_implementation"),
    )
    rpc: Sequence[str] = option(
        (),
        RPC_HELP,
        LLAMACPP,
        metavar=ENDPOINT,
        read_as=list[str] | None,
        more="[devices.md](devices.md).",
        runtimes=_LLAMACPP,
        also=("rpc_servers",),
    )


@dataclass(frozen=True, kw_only=True)
class AskedDrafting:
    """Says who drafts, and from what."""

    drafter: str = model_option(
        "auto",
        "auto, none, or names joined by commas: suffix, recycling, lookahead, jacobi, corpus, "
        "answers, draft-model, cascade, eagle, medusa, dflash, assistant, early-exit, "
        "layer-skip.",
        more="`auto` is `suffix`, `suffix,corpus` where there is a corpus, `suffix,cascade` "
        "where there is a draft, `suffix,answers` with `--remember`: "
        "[drafters.md](drafters.md).",
    )
    draft: str | Sequence[str] | None = model_option(
        None,
        "A smaller model or a trained head, none, or auto: a model that fits and is here; may "
        "be repeated: each one more drafts for the one before.  [default: a pair bundle's own]",
        read_as=list[str] | None,
        more="[models.md](models.md#a-draft-that-is-chosen), "
        "[drafters.md](drafters.md#trained-heads).",
        also=("draft_model", "model_draft", "assistant_model", "speculative_model"),
    )
    draft_overlap: str = model_option(
        "auto",
        "Draft while the model verifies: auto where devices differ.",
        read_as=DraftOverlap,
        more="[drafters.md](drafters.md#draft-models).",
    )
    draft_n_max: int | None = model_option(
        None,
        "Most tokens drafted a round.",
        more="Without it, 15.",
        also=("num_speculative_tokens", "num_assistant_tokens", "num_pred_tokens"),
    )
    exit_layer: int | None = model_option(
        None,
        "Layers that early exit keeps.",
        more="Without it, they are searched.",
        drafters=("early-exit",),
        noun="the exit layer",
    )
    corpora: Sequence[str | Path] = model_option(
        (),
        "Texts that answers may quote: a file or directory; may be repeated.",
        flag="--corpus",
        read_as=list[Path] | None,
        more="Read and sorted at each start.",
        drafters=("corpus",),
        noun="the corpus",
        in_auto=True,
    )
    remember: bool = model_option(
        False,
        "Draft from what earlier requests wrote, which is kept on this machine.",
        flag="--remember",
        more="Up to 250,000 tokens a model; `edge-spec learn forget` removes them: "
        "[drafters.md](drafters.md#what-is-kept-and-where).",
        drafters=("answers",),
        noun="what earlier requests wrote",
        in_auto=True,
    )
    lookahead: str | None = model_option(
        None,
        "Columns, n-gram length and draft tokens of the lookahead window.",
        metavar="W,N,G",
        more="Without it, 2,3,2.",
        drafters=("lookahead",),
        noun="the lookahead window",
    )
    jacobi: str | None = model_option(
        None,
        "How Jacobi's initial tokens are made.",
        read_as=JacobiInit | None,
        more="Without it, `ngram`.",
        drafters=("jacobi",),
        noun="the initial tokens of Jacobi",
    )


@dataclass(frozen=True, kw_only=True)
class AskedDecoding:
    """Says how rounds run."""

    lossless: str = model_option(
        "auto",
        "auto: bit-identical to plain decoding wherever that is cheap; always; ties: never "
        "slowed down for near ties.",
        read_as=LosslessMode,
        more="[lossless.md](lossless.md).",
    )
    exact: bool = model_option(False, "The same as --lossless always.", flag="--exact")
    parallel_rows: int | None = model_option(
        None,
        "Most rows that all conversations together score, a pass.",
        more="Without it, as many as pay.",
    )
    prompt_cache: str | Path | None = model_option(
        None,
        "Keep what was read of long prompts on disk: auto, or a directory.",
        read_as=str | None,
        metavar="DIRECTORY",
        more="Up to 4 GB; `auto` is `prompts/` in the cache directory: "
        "[snapshots.md](snapshots.md#long-prompts).",
    )
    parse_special: bool = model_option(
        False,
        "Read control tokens in messages, too; else their text stays text.",
        flag="--parse-special",
        more="Prompts without a template always have them read: "
        "[reliability.md](reliability.md#what-is-said-stays-text).",
    )
    source_language: str | None = model_option(
        None,
        "The language that a translator of many languages reads, as its vocabulary names it.",
        metavar="NAME",
        more="Such as `eng_Latn`: [models.md](models.md#translators-of-many-languages).",
    )
    target_language: str | None = model_option(
        None,
        "The language that it writes, such as fra_Latn.",
        metavar="NAME",
        more="Without it, the one that the model's files force.",
    )
    call_timeout_s: float | None = model_option(
        None,
        "Seconds that a pass of the model may take before it is given up.",
        more="[reliability.md](reliability.md#the-target). Not with `early-exit` and `layer-skip`.",
        also=("timeout",),
    )


@dataclass(frozen=True, kw_only=True)
class AskedOptions(AskedDecoding, AskedDrafting, AskedPlace):
    """Holds what a user asked for, as it was said. Fields come in the order of the bases from the
    last to the first, as dataclasses have it."""


@dataclass(frozen=True)
class LoadArguments(AskedOptions):
    """The arguments of `edge_spec.load`."""

    model: str | Path = "smollm2"
    _: KW_ONLY
    progress: Progress | None = None


# Other libraries call the model so.
MODEL_ALSO = ("model_path", "model_id", "model_name", "pretrained_model_name_or_path", "path")
