"""Checkpoints that workers write together are read by any other number of them, and are safe like all others."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed
from attn_train.checkpoint import CheckpointFolder, Progress, read_checkpoint
from attn_train.sharded_checkpoint import read_shards

WEIGHTS = {
    "rows": torch.arange(35.0).view(7, 5),
    "columns": torch.arange(24.0).view(2, 12),
    "scalar": torch.tensor(3.0),
}
RANDOM = {"cpu": torch.arange(9, dtype=torch.uint8)}

WORKERS = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from attn_core.errors import CheckpointWriteFailed
from attn_train.checkpoint import CheckpointFolder, Progress
from attn_train.sharded_checkpoint import read_shards

def weights(scale):
    return {
        "rows": scale * torch.arange(35.0).view(7, 5),
        "columns": scale * torch.arange(24.0).view(2, 12),
        "scalar": scale * torch.tensor(3.0),
    }

def worker(rank, count, folder, rendezvous, job):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    def tell(result):
        # One file a worker: lines that several processes print to one pipe may mix.
        Path(f"{rendezvous}-told-{rank}.json").write_text(json.dumps(result))
    def sharded(tensors, places):
        return {name: distribute_tensor(tensor, mesh, [places[name]]) for name, tensor in tensors.items()}
    if job == "write":
        places = {"rows": Shard(0), "columns": Shard(1), "scalar": Replicate()}
        parts = {"weights": sharded(weights(1.0), places), "random": {"cpu": torch.arange(9, dtype=torch.uint8)}}
        try:
            CheckpointFolder(Path(folder)).write(Progress(step=7, elapsed_seconds=1.5), parts, dist.group.WORLD)
            told = "written"
        except CheckpointWriteFailed as error:
            told = error.reason
        tell(told)
    else:
        # Another number of workers, and other dimensions.
        places = {"rows": Shard(1), "columns": Shard(0), "scalar": Replicate()}
        into = {"weights": sharded(weights(0.0), places), "random": {"cpu": torch.zeros(9, dtype=torch.uint8)}}
        read_shards(Path(folder) / "step-000000007", into)
        same = all(torch.equal(into["weights"][n].full_tensor(), t) for n, t in weights(1.0).items())
        tell(same and into["random"]["cpu"].tolist() == list(range(9)))
    dist.destroy_process_group()

if __name__ == "__main__":
    count, folder, rendezvous, job = int(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    mp.start_processes(worker, (count, folder, rendezvous, job), count, start_method="fork")
"""


@pytest.fixture
def workers(tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(textwrap.dedent(WORKERS))

    def run(count, folder, job):
        rendezvous = tmp_path / f"meet-{job}-{count}"
        command = [sys.executable, str(script), str(count), str(folder), str(rendezvous), job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [
            json.loads(tmp_path.joinpath(f"{rendezvous.name}-told-{rank}.json").read_text()) for rank in range(count)
        ]

    return run


def test_two_workers_write_and_one_and_three_read_the_same(tmp_path, workers):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert workers(2, folder.path, "write") == ["written", "written"]
    found = folder.newest()
    names = sorted(path.name for path in found.path.iterdir())
    assert {"manifest.json", "progress.json"} < set(names)
    assert {name for name in names if name.endswith(".safetensors")} >= {
        "weights-00001-of-00002.safetensors",
        "weights-00002-of-00002.safetensors",
    }
    assert all(name.endswith((".json", ".safetensors")) for name in names)
    progress, parts = read_checkpoint(found.path)
    assert progress == Progress(step=7, elapsed_seconds=1.5)
    assert all(torch.equal(parts["weights"][name], tensor) for name, tensor in WEIGHTS.items())
    assert torch.equal(parts["random"]["cpu"], RANDOM["cpu"])
    assert workers(3, folder.path, "read") == [True, True, True]


def test_a_write_that_fails_fails_in_every_worker_and_leaves_nothing(tmp_path, workers):
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the folder should be")
    assert workers(2, blocked, "write") == ["CHECKPOINT_WRITE_FAILED", "CHECKPOINT_WRITE_FAILED"]
    assert blocked.is_file()


def alone(tmp_path):
    folder = CheckpointFolder(tmp_path)
    return folder, folder.write(Progress(step=1, elapsed_seconds=0.0), {"weights": WEIGHTS, "random": RANDOM})


def test_one_worker_writes_and_reads_the_same_format(tmp_path):
    folder, written = alone(tmp_path)
    into = {"weights": {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}}
    read_shards(written.path, into)
    assert all(torch.equal(into["weights"][name], tensor) for name, tensor in WEIGHTS.items())
    assert folder.newest_whole(lambda *_: pytest.fail("damaged")).step == 1


def test_a_tensor_of_another_name_or_shape_and_a_changed_byte_are_refused(tmp_path):
    folder, written = alone(tmp_path)
    with pytest.raises(CheckpointInvalid, match="no tensor weights/other"):
        read_shards(written.path, {"weights": {"other": torch.zeros(1)}})
    with pytest.raises(CheckpointInvalid, match=r"\(7, 5\), not \(5, 7\)"):
        read_shards(written.path, {"weights": {"rows": torch.zeros(5, 7)}})
    shard = written.path / "weights.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    told = []
    assert folder.newest_whole(lambda found, error: told.append(found.step)) is None
    assert told == [1]


def test_nothing_on_the_disk_is_a_pickle(tmp_path):
    _, written = alone(tmp_path)
    for path in written.path.iterdir():
        assert b"\x80\x04" not in path.read_bytes()[:2]
    assert not list(written.path.glob(".metadata")) or written.path.joinpath(".metadata").read_bytes()[:1] == b"{"


def test_a_full_disk_is_the_error_that_jobs_wait_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteFailed):
        CheckpointFolder(tmp_path / "file").write(Progress(step=1, elapsed_seconds=0.0), {"weights": WEIGHTS})
