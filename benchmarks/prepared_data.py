"""Memory and start of training on prepared data: writes shards of so many gigabytes and trains a small decoder on them.

`python benchmarks/prepared_data.py --gigabytes 1` prints JSON: seconds from the config to the first row and the first
step, and the memory of the process, anonymous and mapped, after a few and after all steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.prepared.shards import MANIFEST, TRAIN, DataManifest, ShardWriter, manifest_json, vocabulary_sha256
from attn_train.records import StopFlag
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model

SHARD = 1 << 24
"""Tokens of a shard."""
DOCUMENT = 500
"""Tokens of a document."""


def write_shards(folder: Path, gigabytes: float) -> int:
    """Random tokens of so many gigabytes as prepared data; returns how many there are."""
    tokenizer = byte_pair_tokenizer(["a b c"], 300)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    draw, shards = np.random.default_rng(0), []
    for number in range(max(1, round(gigabytes * 1e9 / 2 / SHARD))):
        writer = ShardWriter(folder, f"train-{number:05d}", "uint16", masked=False)
        tokens = draw.integers(4, tokenizer.vocab_size, SHARD, dtype=np.uint16)
        for start in range(0, SHARD, DOCUMENT):
            writer.add(tokens[start : start + DOCUMENT], ends=True)
        shards.append(writer.close())
    manifest = DataManifest(
        kind="text",
        tokenizer_sha256=vocabulary_sha256(tokenizer),
        vocab_size=tokenizer.vocab_size,
        dtype="uint16",
        columns=("text",),
        seed=0,
        sources=(),
        sets={TRAIN: tuple(shards)},
    )
    (folder / MANIFEST).write_bytes(manifest_json(manifest))
    return len(shards) * SHARD


def memory() -> dict[str, float]:
    """Megabytes of this process, of its own and of mapped files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[0] in ("RssAnon:", "RssFile:")}
    return {name: round(size, 1) for name, size in found.items()}


def measure(folder: Path, steps: int) -> dict[str, object]:
    """Train so many steps on the data of a folder."""
    config = resolved(
        TrainingConfig(
            model=ModelConfig(hidden_size=64, num_layers=2, num_heads=2, max_seq_len=256),
            data=DataConfig(prepared=str(folder)),
            optimizer=OptimizerConfig(steps=steps, batch_size=8),
        )
    )
    began = time.perf_counter()
    dataset = load_dataset(config, folder, print)
    dataset.task(config).next_batch()
    first_row = time.perf_counter() - began
    trainer = Trainer(build_model(config, dataset), dataset, config)
    seen: dict[int, dict[str, float]] = {}
    first_step: list[float] = []

    class Reporter(NullReporter):
        def heartbeat(self) -> None:
            first_step.append(time.perf_counter() - began)
            if len(first_step) in (10, steps):
                seen[len(first_step)] = memory()

    trainer.run(Reporter(), StopFlag())
    return {"seconds_to_first_row": first_row, "seconds_to_first_step": first_step[0], "megabytes_at_step": seen}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        tokens = write_shards(Path(place), asked.gigabytes)
        found = measure(Path(place), asked.steps)
    print(json.dumps({"tokens": tokens, "gigabytes": tokens * 2 / 1e9, **found}, indent=1))


if __name__ == "__main__":
    main()
