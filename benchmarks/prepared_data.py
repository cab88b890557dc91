"""Memory and start-up time of training on prepared data: writes large shards and trains a small decoder on them.

`python benchmarks/prepared_data.py --gigabytes 1` prints JSON measured in a new process: the seconds from its start to
the first step, including imports, as wall-clock and processor time; the seconds from the config to the first row and to
the first step; and the anonymous and mapped memory after a few steps and after all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.data.token_shards.shards import (
    MANIFEST,
    TRAIN,
    DataManifest,
    ShardWriter,
    manifest_json,
    vocabulary_sha256,
)
from attn_train.model import resolved
from attn_train.records import StopFlag
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model

SHARD = 1 << 24
"""The number of tokens in a shard."""
DOCUMENT = 500
"""The number of tokens in a document."""


def write_shards(folder: Path, gigabytes: float) -> int:
    """Write random tokens as prepared data of this size; returns the number of tokens."""
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
    """The resident memory of this process in MiB: anonymous, and of mapped files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines if words[0] in ("RssAnon:", "RssFile:")}
    return {name: round(size, 1) for name, size in found.items()}


def measure(folder: Path, steps: int) -> dict[str, object]:
    """Train for `steps` steps on the prepared data in a folder, and return the measurements."""
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
    first_step: dict[str, float] = {}
    done = 0

    class Reporter(NullReporter):
        def heartbeat(self) -> None:
            nonlocal done
            done += 1
            if done == 1:
                first_step["from_the_process_to_first_step"] = time.time() - psutil.Process().create_time()
                first_step["of_processor_time_to_first_step"] = time.process_time()
                first_step["from_the_config_to_first_step"] = time.perf_counter() - began
            if done in (10, steps):
                seen[done] = memory()

    trainer.run(Reporter(), StopFlag())
    return {"seconds": {"from_the_config_to_first_row": first_row, **first_step}, "megabytes_at_step": seen}


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--starts", type=int, default=3, help="processes that start one after another")
    parser.add_argument("--folder", type=Path, help="train in this process on prepared data that is there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.folder:
        print(json.dumps({"load": os.getloadavg()[0], **measure(asked.folder, asked.steps)}))
        return
    with tempfile.TemporaryDirectory() as place:
        tokens = write_shards(Path(place), asked.gigabytes)
        again = [sys.executable, __file__, "--folder", place, "--steps", str(asked.steps)]
        runs = [
            subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout for _ in range(asked.starts)
        ]
    starts = [json.loads(run.splitlines()[-1]) for run in runs]
    print(json.dumps({"tokens": tokens, "gigabytes": tokens * 2 / 1e9, "starts": starts}, indent=1))


if __name__ == "__main__":
    main()
