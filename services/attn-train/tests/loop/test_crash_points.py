"""A process that dies at any file operation of checkpoints written beside training leaves one that is whole."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

CRASHES = """
import json, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from attn_train.async_checkpoint import AsyncCheckpoints
from attn_train.checkpoint import CheckpointFolder, Progress, read_checkpoint

FILES = {"posix", "io", "_io", "safetensors", "_safetensors_rust", "safetensors._safetensors_rust"}
home, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def parts(step):
    names = ("optimizer", "random", "position")
    return {"weights": {"a": torch.full((64,), float(step))}} | {name: {"b": torch.tensor([step])} for name in names}

def save(folder, step):
    folder.write(Progress(step=step, elapsed_seconds=0.0), parts(step))
    folder.prune(2)

def child(folder, point):
    # Dies before (even points) or after (odd ones) the file operation of this number, in the thread that writes.
    seen = 0
    def profile(frame, event, function):
        nonlocal seen
        if event not in ("c_call", "c_return"):
            return
        owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if owner in FILES or owner.startswith("safetensors"):
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
    threading.setprofile(profile)
    writer = AsyncCheckpoints(folder, 2, None, leads=True)
    state = parts(4)
    for step in (4, 5):
        writer.begin(Progress(step=step, elapsed_seconds=0.0), state)
        writer.wait_for_copy()
        # The next update, beside which this one is written.
        for part in state.values():
            for tensor in part.values():
                tensor += 1
        assert writer.finished().saved.step == step
    os._exit(0)

import safetensors.torch  # not in the children
import shutil, threading
points, newest, point = 0, {}, first
while True:
    place = home / str(point)
    folder = CheckpointFolder(place)
    for step in (1, 2, 3):
        save(folder, step)
    pid = os.fork()
    if not pid:
        child(folder, point)
    _, status = os.waitpid(pid, 0)
    told = []
    after = CheckpointFolder(place)
    after.sweep()
    whole = after.newest_whole(lambda found, error: told.append(str(error)))
    assert whole is not None and not told, (point, told)
    progress, found = read_checkpoint(whole.path)
    step = progress.step
    assert step == whole.step and step in (3, 4, 5), (point, step)
    assert torch.equal(found["weights"]["a"], torch.full((64,), float(step))), point
    assert found["optimizer"]["b"].item() == step, point
    assert len(after.complete()) <= 3
    left = sorted(path.name for path in place.iterdir())
    assert all(name.startswith("step-") for name in left), (point, left)
    save(after, 6)
    assert after.newest_whole(lambda *_: None).step == 6
    newest[step] = newest.get(step, 0) + 1
    shutil.rmtree(place)
    if os.WIFEXITED(status):
        break
    points += 1
    point += stride
print(json.dumps({"points": points, "newest": newest}))
"""


def crash(tmp_path, stride, first=0):
    """Die at every operation whose number is `first` plus a multiple of `stride`."""
    tmp_path.mkdir(exist_ok=True)
    command = [sys.executable, "-c", textwrap.dedent(CRASHES), str(tmp_path), str(first), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_sample_of_crashes_while_saving_leaves_the_newest_whole_checkpoint(tmp_path):
    found = crash(tmp_path, stride=41)
    assert found["points"] >= 8
    assert found["newest"].keys() == {"3", "4", "5"}


@pytest.mark.cluster
@pytest.mark.timeout(3600)
def test_no_crash_while_saving_loses_a_checkpoint(tmp_path):
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda first: crash(tmp_path / str(first), 2, first), range(2))
        assert sum(each["points"] for each in found) >= 200
