"""Which of three models of 2014 still translates when sentences grow long?

A bottleneck LSTM, the same with reversed source sentences, and RNNsearch, with similar numbers of parameters, are
trained on the permuted dictionary of `attn_train.synthetic` (words replaced, neighbours swapped) with sentences of 1 to
14 words. Then each translates, with the engine, new sentences of each length. With `--task words` the word order is
kept, as between languages of similar word order. Reports the fraction of words at the correct position, by length and
seed, and BLEU over all sentences. Run:

    python benchmarks/translation_lengths.py --seeds 3 --out lengths.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.synthetic import synthetic_pairs
from attn_train.model import configured
from attn_train.records import StopFlag
from attn_train.tasks.base import derived
from attn_train.tasks.seq2seq import bleu, tokenize_pairs, translate
from attn_train.trainer import NullReporter, Trainer

TRAINED = 14
LENGTHS = (4, 8, 12, 14, 17, 20)
LONGEST = 24
SIZES = {"max_seq_len": LONGEST, "max_encoder_len": LONGEST, "embedding": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM, source forwards": ("bottleneck", SIZES | {"hidden_size": 96, "reverse_source": False}),
    "LSTM, source backwards": ("bottleneck", SIZES | {"hidden_size": 96, "reverse_source": True}),
    "RNNsearch": ("rnnsearch", SIZES | {"hidden_size": 48, "maxout": 32, "options": {"intermediate_size": 32}}),
}


def specification(name: str, seed: int, steps: int) -> TrainingConfig:
    """The training configuration of one model and seed."""
    family, fields = MODELS[name]
    optimizer = OptimizerConfig(
        steps=steps, batch_size=32, learning_rate=5e-3, min_learning_rate=2e-4, warmup_steps=50, weight_decay=0.0
    )
    model = ModelConfig.of(family, fields)
    return TrainingConfig(model=model, data=DataConfig(dataset="pairs of the task"), optimizer=optimizer, seed=seed)


class Told(NullReporter):
    """Prints the loss from time to time."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Print the loss every hundred steps, on standard error."""
        if step % 100 == 0:
            print(f"step {step} loss {values['loss']:.3f}", file=sys.stderr, flush=True)


def right_words(written: list[str], wanted: list[str]) -> float:
    """The fraction of reference words that the translations have at the same position."""
    found = total = 0
    for ours, theirs in zip(written, wanted, strict=True):
        words = theirs.split()
        total += len(words)
        found += sum(one == other for one, other in zip(ours.split(), words, strict=False))
    return found / total


def run(name: str, seed: int, task: str, steps: int, sentences: int) -> dict[str, Any]:
    """Train one model and measure it at every length."""
    examples = synthetic_pairs(task, 20_000, seed, longest=TRAINED)
    pairs = tokenize_pairs(examples, [], tokenizer="word", longest=(LONGEST, LONGEST))
    config = specification(name, seed, steps)
    family, made = configured(config.model, pairs.model_fields)
    torch.manual_seed(derived(seed, "weights"))
    model = family.build(made)
    began = time.perf_counter()
    Trainer(model, pairs, config).run(Told(), StopFlag())
    seconds, right, all_written, all_wanted = time.perf_counter() - began, {}, [], []
    for length in LENGTHS:
        tests = synthetic_pairs(task, sentences, 10_000 + length, shortest=length, longest=length)
        written = translate(model, pairs.tokenizer, [source for source, _ in tests])
        wanted = [target for _, target in tests]
        right[length] = right_words(written, wanted)
        all_written += written
        all_wanted += wanted
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scores = {"bleu": bleu(all_written, all_wanted), "parameters": parameters, "seconds": seconds}
    return {"model": name, "seed": seed, "right": right, **scores}


def table(rows: list[dict[str, Any]]) -> str:
    """The result table: medians over the seeds, with the lowest and highest in brackets."""
    lines = ["| model | parameters | training, s | " + " | ".join(f"{n} words" for n in LENGTHS) + " | BLEU |"]
    lines.append("|---" * (len(LENGTHS) + 4) + "|")
    for name in MODELS:
        own = [row for row in rows if row["model"] == name]
        if not own:
            continue
        cells = []
        for length in LENGTHS:
            shares = [100 * row["right"][length] for row in own]
            cells.append(f"{statistics.median(shares):.0f} ({min(shares):.0f}-{max(shares):.0f})")
        seconds = statistics.median(row["seconds"] for row in own)
        score = statistics.median(row["bleu"] for row in own)
        lines.append(f"| {name} | {own[0]['parameters']} | {seconds:.0f} | {' | '.join(cells)} | {score:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Train and measure all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=("dictionary", "words"), default="dictionary", help="words: order stays")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--sentences", type=int, default=60, help="of each length")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in args.model or MODELS:
            rows.append(run(name, seed, args.task, args.steps, args.sentences))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if args.out is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "steps": args.steps, "runs": rows}
        args.out.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
