"""How much faster are two workers of a training job than one, each on one thread?

    python benchmarks/worker_scaling_cpu.py           # a table, and benchmarks/results/worker-scaling-cpu.json
    python benchmarks/worker_scaling_cpu.py --rounds 3 --steps 20

The model is nanoGPT's for Shakespeare's characters (6 layers, 6 heads, width 384, context 256). In turns, each in new
processes with one thread: one worker; two independent jobs of one worker, which shows how much the machine's cores slow
each other down; and one job of two data-parallel workers over gloo, each with as many sequences as the single worker.
Seconds of a step are medians after warm-up. Efficiency is the rate of two workers divided by twice that of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.distributed_group import DistributedGroup
from attn_train.layout import MeshLayout
from attn_train.model import resolved
from attn_train.process_group import Group
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import StopFlag
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model
from report import RESULTS, write_report

WARM_UP = 5
"""The number of warm-up steps, which are not counted."""
LONGEST = 600
"""The time limit for a group of processes, in seconds."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="sequences of a worker's part of a batch")
    p.add_argument("--out", type=Path, default=RESULTS / "worker-scaling-cpu.json")
    p.add_argument("--child", nargs=5, metavar=("RANK", "WORKERS", "ROWS", "STEPS", "MEETING"), help=argparse.SUPPRESS)
    return p.parse_args()


def job(workers: int, rows: int, steps: int) -> TrainingConfig:
    """The configuration of a job with enough steps for warm-up and measurement."""
    return TrainingConfig(
        model=ModelConfig(hidden_size=384, num_layers=6, num_heads=6, max_seq_len=256, mechanism="mha"),
        data=DataConfig(dataset="shakespeare"),
        optimizer=OptimizerConfig(steps=WARM_UP + steps, batch_size=rows * workers, warmup_steps=1),
        evaluation=EvaluationConfig(logging_steps=1, eval_steps=10**6, eval_batches=1),
        device="cpu",
        workers=workers,
    )


class Seconds(NullReporter):
    """Records the time at which each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the end of a step."""
        del step
        self.ends.append(values["elapsed_seconds"])


def work(rank: int, workers: int, rows: int, steps: int, meeting: str) -> None:
    """Train as one worker; rank 0 prints the seconds of each step as JSON."""
    torch.set_num_threads(1)
    keep_freed_memory()
    config = resolved(job(workers, rows, steps))
    dataset = load_dataset(config, home_folder(), lambda _: None)
    group = Group()
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
        group = DistributedGroup(MeshLayout.of(config), "cpu")
    seconds = Seconds()
    trainer = Trainer(build_model(config, dataset), dataset, config, group=group)
    trainer.run(seconds, StopFlag())
    if rank == 0:
        taken = [end - begin for begin, end in zip(seconds.ends, seconds.ends[1:], strict=False)]
        print(json.dumps(taken[WARM_UP - 1 :]), flush=True)
    if workers > 1:
        dist.barrier()
    os._exit(0)  # gloo threads that are still running when Python exits can make the process fail


def seconds_of_a_step(together: int, apart: int, rows: int, steps: int) -> float:
    """The median seconds of a step with `apart` concurrent jobs of `together` workers each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--child"]
                + [str(part) for part in (rank, together, rows, steps, Path(folder) / f"meeting-{of}")],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for of in range(apart)
            for rank in range(together)
        ]
        said = [process.communicate(timeout=LONGEST)[0] for process in started]
    return statistics.median(second for text in said if text.strip() for second in json.loads(text))


def rows_of_table(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each number of sequences per worker: rates and efficiencies, medians and the values of all rounds."""
    for rows in args.rows:
        rounds = []
        for _ in range(args.rounds):
            one = seconds_of_a_step(1, 1, rows, args.steps)
            rounds.append((one, seconds_of_a_step(1, 2, rows, args.steps), seconds_of_a_step(2, 1, rows, args.steps)))
        yield {
            "rows_of_a_worker": rows,
            "seconds_of_a_step": dict(
                zip(
                    ("one worker", "two jobs", "two workers"),
                    map(statistics.median, zip(*rounds, strict=True)),
                    strict=True,
                )
            ),
            "two_jobs_over_twice_one": [round(one / apart, 3) for one, apart, _ in rounds],
            "two_workers_over_twice_one": [round(one / both, 3) for one, _, both in rounds],
            "two_workers_over_two_jobs": [round(apart / both, 3) for _, apart, both in rounds],
        }


def main() -> None:
    args = arguments()
    if args.child:
        rank, workers, rows, steps, meeting = args.child
        work(int(rank), int(workers), int(rows), int(steps), meeting)
    write_report("worker-scaling-cpu", {"question": __doc__.splitlines()[0]}, rows_of_table(args), args.out)  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
