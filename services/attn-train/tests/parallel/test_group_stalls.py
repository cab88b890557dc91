"""A group of workers waits out a full disk together, and keeps its checkpoints in a store that all machines reach."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attn_gateway.records import ArtifactStore
from attn_schema.training import Metrics, TrainingConfig
from attn_train.attempt import Assignment, Finished, TrainingStarted
from attn_train.checkpoint import CheckpointFolder
from attn_train.model import resolved
from attn_train.object_checkpoints import checkpoints_of
from attn_train.records import StopFlag
from attn_train.settings import Layout
from attn_train.worker import work
from s3_server import bucket_server

SECONDS = 240

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def sent(folder):
    """What the leading worker has sent: kinds and values, in order."""
    path = folder / "sent-0.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until(condition, what, processes):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        assert all(process.poll() in (None, 0) for process in processes), what
        time.sleep(0.05)


def config_of(folder):
    choose = random.Random(7)
    text = " ".join(choose.choice(["query", "key", "value", "softmax", "head"]) for _ in range(400))
    (folder / "words.txt").write_text(text)
    return {
        "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "max_seq_len": 16},
        "data": {"dataset": str(folder / "words.txt")},
        "optimizer": {"steps": 12, "batch_size": 4, "warmup_steps": 2, "learning_rate": 1e-2},
        "evaluation": {"logging_steps": 1, "eval_steps": 1000, "eval_batches": 1},
        "checkpoint": {"save_steps": 5},
        "device": "cpu",
        "workers": 2,
        "dp_shard": 2,
    }


def run_workers(folder, while_running=lambda _: None):
    """The outcomes of two workers, which `while_running` gets as processes."""
    told = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("attempt.py"))]
    workers = [subprocess.Popen([*command, str(rank), str(folder)], env=told) for rank in range(2)]
    try:
        while_running(workers)
        until(lambda: all(worker.poll() == 0 for worker in workers), "the workers do not end", workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(2)]


def prepare_attempt(folder, disk):
    """An attempt whose home is on this disk, which is filled next."""
    attempt = {"config": config_of(folder), "homes": [str(disk)] * 2}
    (folder / "attempt.json").write_text(json.dumps(attempt))
    # The folder and the lock of the job are there before the disk is full.
    Layout(disk).job("job").mkdir(parents=True)
    Layout(disk).worker_lock("job").touch()


@pytest.mark.cluster
def test_two_workers_that_are_stalled_can_be_stopped(tmp_path, small_disk, fill):
    prepare_attempt(tmp_path, small_disk)
    fill(small_disk)

    def stop_once_stalled(workers):
        until(lambda: any(kind == "Stalled" for kind, _ in sent(tmp_path)), "the job does not stall", workers)
        (tmp_path / "stop").touch()

    outcomes = run_workers(tmp_path, stop_once_stalled)
    assert outcomes == [["Stopped", {"stop": "save"}]] * 2


def test_a_full_disk_stalls_two_workers_until_there_is_room(tmp_path, small_disk, fill):
    prepare_attempt(tmp_path, small_disk)
    fill(small_disk)

    def make_room_once_stalled(workers):
        until(lambda: any(kind == "Stalled" for kind, _ in sent(tmp_path)), "the job does not stall", workers)
        (small_disk / "filler").unlink()

    outcomes = run_workers(tmp_path, make_room_once_stalled)
    assert [kind for kind, _ in outcomes] == ["Finished", "Finished"], outcomes
    said = sent(tmp_path)
    (stalled,) = [values for kind, values in said if kind == "Stalled"]
    assert stalled["error"]["reason"] == "CHECKPOINT_WRITE_FAILED"
    assert [kind for kind, _ in said if kind in ("Stalled", "Resumed")] == ["Stalled", "Resumed"]
    assert [values["step"] for kind, values in said if kind == "Metrics"] == list(range(1, 13))
    assert CheckpointFolder(Layout(small_disk).checkpoints("job")).newest_whole(lambda *_: None).step == 12
    assert Path(outcomes[0][1]["model_path"]).is_dir()


def test_workers_of_two_machines_keep_checkpoints_and_model_in_a_store_and_a_third_goes_on(tmp_path, monkeypatch):
    config, url = config_of(tmp_path), "s3://bucket/prefix"
    homes = [str(tmp_path / name) for name in ("first", "second")]
    (tmp_path / "attempt.json").write_text(json.dumps({"config": config, "homes": homes, "artifacts": url}))
    with bucket_server() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        outcomes = run_workers(tmp_path)
        assert [kind for kind, _ in outcomes] == ["Finished", "Finished"], outcomes
        kept = checkpoints_of("job", tmp_path / "third", url).newest_whole(lambda *_: pytest.fail("damaged"))
        assert (kept.step, kept.where) == (12, f"{url}/checkpoints/job/step-000000012")
        parts = [name for name in bucket.objects if "step-000000012-" in name and "weights" in name]
        assert len(parts) == 2
        assert ArtifactStore(url, tmp_path / "cache").fetch("job").is_dir()
        alone = resolved(TrainingConfig.from_mapping(config | {"workers": 1, "dp_shard": 1}))
        alone = alone.replace(optimizer=alone.optimizer.replace(steps=15))
        messages = []
        assignment = Assignment(job_id="job", attempt=2, config=alone, home=tmp_path / "third", artifacts=url)
        outcome = work(assignment, messages.append, StopFlag())
    assert isinstance(outcome, Finished), outcome
    (started,) = [message for message in messages if isinstance(message, TrainingStarted)]
    assert (started.step, started.checkpoint.step) == (12, 12)
    assert [message.step for message in messages if isinstance(message, Metrics)] == [13, 14, 15]
