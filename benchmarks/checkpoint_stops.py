"""For how long does training stop for a checkpoint? A decoder of SmolLM2-135M's sizes, in float32, with AdamW.

    python benchmarks/checkpoint_stops.py

Prints, and writes to benchmarks/results/checkpoint-stops-cpu.json, the seconds for which training stopped for each
checkpoint (`Trainer.checkpoint_stops`), and the seconds of steps during which a checkpoint was being written and of
other steps. Needs 6 GB of memory, and 5 GB of disk below --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.checkpoint import CheckpointFolder
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import StopFlag
from attn_train.tasks.language_modeling import tokenize
from attn_train.trainer import NullReporter, Trainer

RESULT = Path(__file__).parent / "results" / "checkpoint-stops-cpu.json"
BAR = 0.2
"""The limit for the time that training stops, in seconds."""
SIZES = {"hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}
KINDS = {"mechanism": "gqa", "feed_forward": "swiglu", "tie_word_embeddings": True}
"""The options of SmolLM2-135M, which has a vocabulary of 49152 tokens and tied embeddings."""


class Recorder(NullReporter):
    """Records the seconds of each step and the bytes of each checkpoint."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.sizes: list[int] = []
        self._before = 0.0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the seconds of a step."""
        self.seconds[step] = values["elapsed_seconds"] - self._before
        self._before = values["elapsed_seconds"]
        print(f"  step {step}: {self.seconds[step]:.2f} s", flush=True)

    def checkpoint(self, step: int, where: str, size: int) -> None:
        """Record the size of a checkpoint that has been written."""
        del step, where
        self.sizes.append(size)


def config_of(asked: argparse.Namespace) -> TrainingConfig:
    """The configuration of the run: no evaluation, and a checkpoint every `save_steps` steps."""
    return TrainingConfig(
        model=ModelConfig(hidden_size=64, max_seq_len=asked.context),
        data=DataConfig(dataset="shakespeare"),
        optimizer=OptimizerConfig(steps=asked.steps, batch_size=asked.rows, warmup_steps=1).with_defaults(),
        checkpoint=CheckpointConfig(save_steps=asked.save_steps, save_total_limit=1),
        evaluation=EvaluationConfig(eval_steps=10**9, eval_batches=1, logging_steps=1),
    )


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Train, and return the measured cost of checkpoints."""
    choose = random.Random(0)
    text = tokenize("".join(choose.choices("abcdefghijklmnopqrstuvwxyz ", k=100_000)))
    model = Decoder(DecoderConfig(vocab_size=49152, max_seq_len=asked.context, **KINDS, **SIZES))
    checkpoints, seen = CheckpointFolder(folder / "run"), Recorder()
    trainer = Trainer(model, text, config_of(asked), checkpoints=checkpoints)
    trainer.run(seen, StopFlag())
    # The last checkpoint is excluded: the run waits for it at its end.
    stops = trainer.checkpoint_stops.seconds[:-1]
    beside = {step + 1 for step in range(asked.save_steps, asked.steps, asked.save_steps)}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes_of_a_checkpoint": seen.sizes[0],
        "seconds_stopped": stops,
        "had_to_wait_for_the_one_before": trainer.checkpoint_stops.waits,
        "seconds_of_a_step": statistics.median(s for step, s in seen.seconds.items() if step not in beside),
        "seconds_of_the_step_beside": [seen.seconds[step] for step in sorted(beside)],
        "holds": max(stops) < BAR,
    }


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; by default the system's own")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    result: dict[str, object] = {
        "command": ["python", *sys.argv],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor(), "threads": asked.threads, "torch": torch.__version__},
        "load_before": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        result |= measured(asked, Path(place))
    result["load_after"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
