"""Counts how often a trained drafter is right in answers to the benchmark's prompts.

    python benchmarks/head_acceptance.py smollm2 HEAD [HEAD ...]

The target answers each prompt greedily. From every place of an answer, up to where it begins to
repeat itself, each drafter drafts after the target's own tokens; position i counts where all before
it were right. Tokens a round are of rounds as they are decoded, each from where the one before it
ended, with 1, 2, ... draft tokens. Drafters are those that `edge-spec distill` writes; it needs the
extra `distill`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import report

import edge_spec
from edge_spec.core.model_info import Checkpoint
from edge_spec.diagnostics.bench.loops import in_loops
from edge_spec.distill.acceptance import measured_acceptance
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.draft_cost import draft_token_s
from edge_spec.distill.draft_runs import DraftRuns
from edge_spec.distill.eagle3 import Eagle3Trainee
from edge_spec.distill.features import Example, FeatureRequest, read_features
from edge_spec.distill.kinds import eagle3_layers
from edge_spec.distill.medusa import MedusaTrainee
from edge_spec.distill.small_draft import SmallDraftTrainee
from edge_spec.distill.tensor_file import read_tensors
from edge_spec.distill.trainee import Teacher, Trainee, drafted
from edge_spec.distill.windows import batch_of, windows_of
from edge_spec.loader.head import StoredTables, open_weights
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.runtimes import is_head
from edge_spec.models.source import Source
from edge_spec.text.prompt_files import Prompt, read_prompts

_ROOM = 4_000_000_000  # bytes of features


def answered(model: str, prompts: list[Prompt], max_tokens: int, folder: Path) -> list[Example]:
    with edge_spec.load(model, drafter="none") as engine:
        found = []
        for index, prompt in enumerate(prompts):
            asked = engine.chat_prompt(prompt.text)
            answer = [token.id for token in engine.chat(prompt.text, max_tokens=max_tokens).tokens]
            loops = in_loops(answer)
            answer = answer[: int(loops.argmax())] if loops.any() else answer
            tokens = np.array([*asked, *answer], np.int32)
            found.append(Conversation(tokens, len(asked), index % 2 == 0))
        layers = engine.parts.model.config.num_layers
        request = FeatureRequest((*eagle3_layers(layers), layers), False, _ROOM)
        return read_features(
            engine.parts.model, found, request, folder, lambda what, fraction: None
        )


def opened(head: Path, weights: Checkpoint, positions: int) -> tuple[Trainee, Teacher]:
    """A head as it was trained."""
    tensors, _ = read_tensors(head / "model.safetensors")
    if "d2t" not in tensors:
        return opened_draft(tensors, weights, positions)
    ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    teacher = Teacher(weights.config, StoredTables(weights).output_rows(ids), ids)
    trainee: Trainee
    if "fc.weight" in tensors:
        trainee = Eagle3Trainee(teacher, weights, positions)
    else:
        blocks = [name.split(".")[:2] for name in tensors if name.endswith("linear.weight")]
        trainee = MedusaTrainee(
            teacher, len({head for head, _ in blocks}), len({block for _, block in blocks})
        )
    for name, parameter in trainee.parameters.items():
        parameter.data.copy_(torch.from_numpy(tensors[name]))
    return trainee, teacher


def opened_draft(
    tensors: dict[str, np.ndarray], weights: Checkpoint, positions: int
) -> tuple[Trainee, Teacher]:
    """An ordinary small draft, which drafts from the whole vocabulary."""
    ids = np.arange(weights.config.vocab_size)
    teacher = Teacher(weights.config, StoredTables(weights).output_rows(ids), ids)
    count = sum(name.endswith("mlp.up_proj.weight") for name in tensors)
    trainee = SmallDraftTrainee(teacher, weights, count, positions)
    for name, parameter in trainee.parameters.items():
        parameter.data.copy_(torch.from_numpy(tensors[name].astype(np.float32)))
    return trainee, teacher


def draft_token_ms(drafter: Path, weights: Checkpoint) -> float:
    if is_head(drafter):
        return 1e3 * draft_token_s(drafter, weights.config, weights)
    runs = DraftRuns(AskedOptions(), 0, lambda what, fraction: None)
    return 1e3 * runs.token_s(drafter)


def measure(
    head: Path,
    weights: Checkpoint,
    prompts: list[Prompt],
    examples: list[Example],
    positions: int,
) -> dict[str, Any]:
    trainee, teacher = opened(head, weights, positions)
    drafts = defaultdict(list)
    for prompt, example in zip(prompts, examples, strict=True):
        for window in windows_of([example], 512):
            batch = batch_of([window], trainee.num_positions)
            one = drafted(trainee, batch), batch.written[batch.anchors]
            for name in ("all", prompt.category):
                drafts[name].append(one)
    written = np.concatenate([e.conversation.tokens[e.conversation.start :] for e in examples])
    found = {name: measured_acceptance(of) for name, of in drafts.items()}
    for name, each in found.items():
        chances = " ".join(f"{100 * chance:.0f} %" for chance in each.of_position)
        rounds = " ".join(f"{tokens:.2f}" for tokens in each.tokens_a_round)
        print(f"{head.name} {name}: {chances}; tokens a round {rounds}")
    scored = float(np.isin(written, teacher.token_ids).mean())
    token_ms = draft_token_ms(head, weights)
    print(
        f"{head.name} scores {100 * scored:.1f} % of {len(written)} tokens, {token_ms:.2f} ms each"
    )
    acceptance = {name: asdict(each) for name, each in found.items()}
    return {"acceptance": acceptance, "coverage": scored, "draft_token_ms": token_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("heads", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--positions", type=int, default=3, help="draft tokens (Medusa: its heads)")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)
    weights = open_weights(Source(arguments.model, lambda what, fraction: None), "a head shares")
    with TemporaryDirectory() as folder:
        examples = answered(arguments.model, prompts, arguments.max_tokens, Path(folder))
        found = {
            str(head): measure(head, weights, prompts, examples, arguments.positions)
            for head in arguments.heads
        }
    report({"head_acceptance": found}, arguments.out)


if __name__ == "__main__":
    main()
