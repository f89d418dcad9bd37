"""Trains two T5s on tasks made on the spot, a larger and a smaller one that can draft for it.

    pip install torch transformers
    python benchmarks/train_t5.py OUT [--steps 4000] [--only large|small]

writes OUT/large, OUT/small (Hugging Face directories with one tokenizer) and OUT/prompts.jsonl:
prompts of each task (t5_tasks.py) that were held out, for `edge-spec bench --prompts`. The smaller
one learns what the larger one would write next (distillation, Hinton et al. 2015), as a draft is
best trained (Zhou et al. 2024, DistillSpec). Seeds are fixed; some ten minutes of one core each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from t5_tasks import TASKS, pairs

PAD, EOS, UNKNOWN = 0, 1, 2
VOCABULARY = 512
PIECES = 500
SIZES: dict[str, dict[str, int]] = {
    "large": {"d_model": 96, "d_kv": 32, "d_ff": 256, "num_heads": 5, "num_layers": 3},
    "small": {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 3, "num_layers": 2},
}
_BATCH, _PEAK_RATE, _WARM_UP = 32, 3e-3, 100
_SORTED = 8  # batches that are sorted by length together, so that little of one is padding
_HELD_OUT = 8  # of each task


def trained_tokenizer() -> Any:
    """A unigram tokenizer as T5's is: words begin with a mark in the place of their space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [text for _, pair in zip(range(10000), pairs(1), strict=False) for text in pair[1:]]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=PIECES,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(name: str, tokenizer: Any, steps: int, teacher: Any = None) -> Any:
    """Returns the model. teacher: whose scores it learns beside the answers. Prints the loss as it
    goes."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices are small: more threads wait for each other
    config = T5Config(
        vocab_size=VOCABULARY,
        **SIZES[name],
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _PEAK_RATE, total_steps=steps, pct_start=min(0.5, _WARM_UP / steps)
    )
    batches, started_s = _batches(tokenizer), time.perf_counter()
    for step in range(steps):
        read, written = next(batches)
        given = {"input_ids": read, "attention_mask": read != PAD, "labels": written}
        out = model(**given)
        loss = out.loss
        if teacher is not None:
            with torch.no_grad():
                scores = teacher(**given).logits
            loss = loss + _divergence(scores, out.logits, written != -100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step + 1 == steps:
            taken_s = time.perf_counter() - started_s
            print(f"{name}: step {step}, loss {loss.item():.3f}, {taken_s:.0f} s", flush=True)
    return model.eval()


def _batches(tokenizer: Any) -> Iterator[tuple[Any, Any]]:
    """Sources, and the labels of their answers."""
    source, draw = pairs(2), random.Random(2)
    while True:
        texts = [next(source) for _ in range(_SORTED * _BATCH)]
        coded = [
            [[*tokenizer.encode(text).ids, EOS] for text in (question, answer)]
            for _, question, answer in texts
        ]
        coded.sort(key=lambda pair: len(pair[0]))
        found = [coded[start : start + _BATCH] for start in range(0, len(coded), _BATCH)]
        draw.shuffle(found)
        for batch in found:
            read, written = zip(*batch, strict=True)
            yield _padded(read, PAD), _padded(written, -100)


def _divergence(scores: Any, own: Any, counted: Any) -> Any:
    """KL(teacher | model), mean over the answers' tokens."""
    import torch

    expected, found = (torch.log_softmax(each[counted], -1) for each in (scores, own))
    return torch.nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True)


def _padded(rows: Sequence[list[int]], filler: int) -> Any:
    import torch

    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def held_out() -> list[dict[str, str]]:
    """Prompts of each task, in the form that `edge-spec bench --prompts` reads."""
    source, found = pairs(3), []
    for number in range(_HELD_OUT * len(TASKS)):
        task, prompt, _ = next(source)
        found.append({"id": f"{task}-{number}", "category": task, "prompt": prompt})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--only", choices=list(SIZES), help="the small one needs the large one")
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import Tokenizer
    from transformers import T5ForConditionalGeneration

    kept = asked.out / "large" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(kept)) if asked.only == "small" else trained_tokenizer()
    for name in SIZES if asked.only is None else [asked.only]:
        teacher = None
        if name == "small":
            teacher = T5ForConditionalGeneration.from_pretrained(asked.out / "large").eval()
        directory = asked.out / name
        train(name, tokenizer, asked.steps, teacher).save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
    lines = [json.dumps(each) for each in held_out()]
    (asked.out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
