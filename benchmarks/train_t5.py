"""Trains two T5s on tasks made on the spot, a larger and a smaller one that can draft for it.

    pip install torch transformers
    python benchmarks/train_t5.py OUT [--steps 1500]

writes OUT/large, OUT/small (Hugging Face directories with one tokenizer) and OUT/prompts.jsonl:
prompts of each task that were held out, for `edge-spec bench --prompts`. The tasks are numbers in
words, words in numbers and dates from one form to another. Seeds are fixed; a few minutes each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = 0, 1, 2
VOCABULARY = 384
SIZES: dict[str, dict[str, int]] = {
    "large": {"d_model": 128, "d_kv": 32, "d_ff": 320, "num_heads": 6, "num_layers": 3},
    "small": {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "num_layers": 1},
}
_BATCH, _PEAK_RATE, _WARM_UP = 32, 2e-3, 100
_HELD_OUT = 8  # of each task
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)


def in_words(number: int) -> str:
    """A number below a million."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        rest = "" if number % 10 == 0 else f"-{_ONES[number % 10]}"
        return _TENS[number // 10 - 2] + rest
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = "" if number % size == 0 else f" and {in_words(number % size)}"
    return f"{in_words(number // size)} {name}{rest}"


def _words(draw: random.Random) -> tuple[str, str]:
    numbers = [draw.randrange(10 ** draw.randint(2, 6)) for _ in range(draw.randint(1, 2))]
    said = "; ".join(map(in_words, numbers))
    return f"say the numbers: {'; '.join(map(str, numbers))}", said


def _numbers(draw: random.Random) -> tuple[str, str]:
    prompt, said = _words(draw)
    return f"write in digits: {said}", prompt.partition(": ")[2]


def _dates(draw: random.Random) -> tuple[str, str]:
    count = draw.randint(1, 2)
    days = [
        (draw.randint(1, 28), draw.randint(1, 12), draw.randint(1800, 2099)) for _ in range(count)
    ]
    short = "; ".join(f"{year}-{month:02}-{day:02}" for day, month, year in days)
    long = "; ".join(f"{_MONTHS[month - 1]} {day}, {year}" for day, month, year in days)
    return f"write out the dates: {short}", long


TASKS = {"words": _words, "numbers": _numbers, "dates": _dates}


def pairs(seed: int) -> Iterator[tuple[str, str, str]]:
    """Endlessly: a task, a source and its answer."""
    draw = random.Random(seed)
    while True:
        for name, task in TASKS.items():
            yield name, *task(draw)


def trained_tokenizer() -> Any:
    """A unigram tokenizer as T5's is: words begin with a mark in the place of their space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [text for _, pair in zip(range(6000), pairs(1), strict=False) for text in pair[1:]]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY - 100,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(name: str, tokenizer: Any, steps: int) -> Any:
    """Returns the model. Prints the loss as it goes."""
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
    source, started_s = pairs(2), time.perf_counter()
    for step in range(steps):
        batch = [next(source) for _ in range(_BATCH)]
        read = _padded([[*tokenizer.encode(pair[1]).ids, EOS] for pair in batch], PAD)
        written = _padded([[*tokenizer.encode(pair[2]).ids, EOS] for pair in batch], -100)
        loss = model(input_ids=read, attention_mask=read != PAD, labels=written).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step + 1 == steps:
            print(f"{name}: step {step}, loss {loss.item():.3f}", flush=True)
    print(f"{name}: {time.perf_counter() - started_s:.0f} s", flush=True)
    return model.eval()


def _padded(rows: list[list[int]], filler: int) -> Any:
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
    parser.add_argument("--steps", type=int, default=1500)
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    tokenizer = trained_tokenizer()
    for name in SIZES:
        directory = asked.out / name
        train(name, tokenizer, asked.steps).save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
    lines = [json.dumps(each) for each in held_out()]
    (asked.out / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
