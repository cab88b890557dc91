"""Are the estimates of `attn train --dry-run` accurate? Compares time, memory and FLOPs with real jobs, on this CPU.

    python benchmarks/dry_run_cpu.py                      # a table, and benchmarks/results/dry-run-cpu.json
    python benchmarks/dry_run_cpu.py --mechanisms mha --rounds 1

For each mechanism, `--rounds` times in turn: the estimate, in a process of its own as on a server, then the whole job,
in another process. Compared are medians over the rounds: the seconds of all steps; the process's peak memory, including
the writing of a checkpoint and the model; and the FLOPs of a step, as torch's counter reports them for the job's own
step, without those of C++ attention kernels. Estimates and jobs run on the same machine, whose load is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    Metrics,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.attempt import Assignment, Finished
from attn_train.data.load import load_dataset
from attn_train.estimate import estimated_apart
from attn_train.model import resolved
from attn_train.process_tuning import keep_freed_memory, spin_briefly
from attn_train.records import StopFlag
from attn_train.step_probe import StepProbe
from attn_train.worker import build_model, work

RESULT = Path(__file__).parent / "results" / "dry-run-cpu.json"
MECHANISMS = {
    "mha": {},
    "gqa": {"num_kv_heads": 2},
    "mla": {},
    "mamba2": {},
    "nsa": {},
}
BAR = 0.15


def config_of(mechanism: str, asked: argparse.Namespace, home: Path) -> TrainingConfig:
    """The configuration of the job: a character-level decoder, with one intermediate checkpoint and no validation."""
    return resolved(
        TrainingConfig(
            model=ModelConfig(
                mechanism=mechanism,
                hidden_size=asked.hidden_size,
                num_layers=asked.layers,
                num_heads=4,
                max_seq_len=asked.context,
                **MECHANISMS[mechanism],
            ),
            data=DataConfig(dataset=str(home / "letters.txt")),
            optimizer=OptimizerConfig(steps=asked.steps, batch_size=asked.rows, warmup_steps=1),
            checkpoint=CheckpointConfig(save_steps=asked.steps // 2),
            evaluation=EvaluationConfig(eval_steps=10**9, eval_batches=1, logging_steps=1),
        )
    )


def job(asked: dict[str, Any]) -> dict[str, float]:
    """Run the whole job in this process, as a worker does; returns its seconds and its peak memory in bytes."""
    config, home, seen = TrainingConfig.from_mapping(asked["config"]), Path(asked["home"]), []

    def send(message: object) -> None:
        if isinstance(message, Metrics):
            seen.append(message.values["elapsed_seconds"])

    outcome = work(Assignment(job_id=asked["job"], attempt=1, config=config, home=home), send, StopFlag())
    if not isinstance(outcome, Finished):
        raise SystemExit(f"the job ended as {outcome}")
    steps = [after - before for before, after in itertools.pairwise([0.0, *seen])]
    skewed = statistics.fmean(steps) / statistics.median(steps)
    return {
        "seconds": seen[-1],
        "mean_over_median": skewed,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def flops(asked: dict[str, Any]) -> dict[str, float]:
    """The FLOPs that torch's counter finds in one step of the job."""
    config = TrainingConfig.from_mapping(asked["config"])
    data = load_dataset(config, Path(asked["home"]), lambda _: None)
    probe = StepProbe(config, data, lambda: build_model(config, data))
    return {"flops": float(probe.flops(config.optimizer.batch_size))}


def child(what: str, question: dict[str, Any]) -> dict[str, float]:
    """Run the measurement `what` in a new process and return its result."""
    command = [sys.executable, __file__, "--child", what]
    told = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def answer(what: str) -> None:
    """In the child process: read the question from standard input and print the result as JSON."""
    question = json.loads(sys.stdin.read())
    keep_freed_memory()
    torch.set_num_threads(question["threads"])
    print("\n" + json.dumps({"job": job, "flops": flops}[what](question)))


def compared(mechanism: str, asked: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The result row of a mechanism: estimates compared with jobs."""
    config = config_of(mechanism, asked, home)
    question = {"config": msgspec.to_builtins(config), "home": str(home), "threads": asked.threads}
    rounds = []
    for number in range(asked.rounds):
        load = os.getloadavg()[0]
        said = asyncio.run(estimated_apart(config, home, asked.threads))
        found = child("job", {**question, "job": f"{mechanism}-{number}"})
        rounds.append(
            {
                "load": load,
                "estimated_seconds": said.seconds,
                "seconds": found["seconds"],
                "estimated_bytes": said.memory_bytes,
                "bytes": found["bytes"],
                "mean_step_over_median": found["mean_over_median"],
            }
        )
    counted = child("flops", question)["flops"]
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratios = {
        "time": middle["estimated_seconds"] / middle["seconds"],
        "memory": middle["estimated_bytes"] / middle["bytes"],
        "flops": said.flops / asked.steps / counted,
    }
    print(f"{mechanism:10}", *(f"{name} {ratio:6.3f}" for name, ratio in ratios.items()), flush=True)
    for one in rounds:
        print(
            "   ", {name: round(value, 2) if value < 1e4 else f"{value / 2**20:.0f} MiB" for name, value in one.items()}
        )
    return {
        "mechanism": mechanism,
        "parameters": said.parameters,
        "estimated_over_measured": ratios,
        "within_15_percent": {name: abs(ratio - 1) <= BAR for name, ratio in ratios.items()},
        "flops_of_a_step": {"estimated": said.flops / asked.steps, "counted": counted},
        "rounds": rounds,
    }


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", choices=["job", "flops"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        answer(asked.child)
        return
    spin_briefly()
    result: dict[str, Any] = {
        "command": ["python", *sys.argv],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor(), "threads": asked.threads, "torch": torch.__version__},
    }
    with tempfile.TemporaryDirectory() as place:
        home, choose = Path(place), random.Random(0)
        (home / "letters.txt").write_text("".join(choose.choices("abcdefghijklmnopqrstuvwxyz .", k=200_000)))
        result["mechanisms"] = found = []
        for mechanism in asked.mechanisms:
            found.append(compared(mechanism, asked, home))
            asked.out.write_text(json.dumps(result | {"load_after": os.getloadavg()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
