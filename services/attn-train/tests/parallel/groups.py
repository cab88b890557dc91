"""Runs small jobs on groups of processes that talk through gloo, and alone; the processes are those of rank.py."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

SECONDS = 600
"""How long a group may take; it is killed then."""

LOSSES = {"float32": 1e-6, "float64": 1e-12}
"""By how much losses may differ."""


def write_data(folder):
    """A text of words, and pairs of words and their reverse."""
    choose = random.Random(7)
    text = " ".join(choose.choice(["query", "key", "value", "softmax", "head"]) for _ in range(400))
    (folder / "words.txt").write_text(text)
    words = [[choose.choice("abcdefgh") for _ in range(choose.randint(2, 6))] for _ in range(60)]
    (folder / "pairs.tsv").write_text("".join(f"{' '.join(word)}\t{' '.join(word[::-1])}\n" for word in words))


def job(folder, model, *, steps=10, data=None, optimizer=None, checkpoint=None, **layout):
    """The config of a job as plain values."""
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "max_seq_len": 16}
    return {
        "model": {**small, **model},
        "data": {"dataset": str(folder / "words.txt"), **(data or {})},
        "optimizer": {"steps": steps, "batch_size": 4, "warmup_steps": 2, "learning_rate": 1e-2, **(optimizer or {})},
        "evaluation": {"logging_steps": 1, "eval_steps": 1000, "eval_batches": 1},
        "checkpoint": checkpoint or {},
        "device": "cpu",
        **layout,
    }


def run_group(folder, workers, runs):
    """What the leading worker found in each run, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    told = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("rank.py"))]
    ranks = [
        subprocess.Popen([*command, str(rank), str(workers), str(folder)], env=told, stderr=subprocess.PIPE, text=True)
        for rank in range(workers)
    ]
    try:
        said = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * workers, said
    return {run["name"]: json.loads((folder / f"{run['name']}.json").read_text()) for run in runs}


def beside_one(folder, workers, cases, dtype, steps=10):
    """What groups find, and what one worker finds, of each case: (model and parts of the job, layout) by name."""
    write_data(folder)
    runs = []
    for name, (parts, layout) in cases.items():
        alone = job(folder, **{"steps": steps, **parts})
        runs.append({"name": f"{name}-alone", "config": alone, "dtype": dtype})
        runs.append({"name": name, "config": {**alone, "workers": workers, **layout}, "dtype": dtype})
    return run_group(folder, workers, runs)


def require_equal_losses(found, name, bound):
    """Losses and gradient norms of every step, and the weights at the end."""
    one, several = found[f"{name}-alone"], found[name]
    assert "error" not in several, several
    assert one["metrics"].keys() == several["metrics"].keys()
    for step, expected in one["metrics"].items():
        for value in ("loss", "gradient_norm"):
            wanted = expected[value]
            assert abs(several["metrics"][step][value] - wanted) <= bound * max(1, abs(wanted)), (name, step, value)
    assert abs(several["weights"] - one["weights"]) <= 100 * bound * one["weights"]
