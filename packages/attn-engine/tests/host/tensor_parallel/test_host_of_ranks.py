"""A host starts the ranks of its model, ends with any of them, and refuses before that what cannot be split."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_engine.client import TextTask
from attn_engine.host.ranks import rank_threads, require_tensor_parallel
from attn_engine.in_process import open_host
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import EngineConfig, Prompt, SamplingParams
from attn_schema.cores import usable_cores

ALPHABET = "abcdefghijklmnopqrstuvwxyz ."
SECONDS = 120
"""How long a host may take for anything; it is killed then."""


def saved(place, **values):
    torch.manual_seed(0)
    family = installed().models.get("decoder")
    sizes = {"vocab_size": len(ALPHABET), "max_seq_len": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    gates = {"feed_forward": "swiglu", "norm": "rms"}
    model = family.build(family.configure({**sizes, **gates, **values}))
    save_model(place, model, character_tokenizer(ALPHABET))
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture
def host(folder, tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("host.py")), str(folder), str(tmp_path)]
    with (tmp_path / "stderr").open("wb") as said:
        process = subprocess.Popen(command, stderr=said)
    try:
        yield read(tmp_path / "first.json", process), process, tmp_path
    finally:
        process.kill()
        process.wait()


def read(path, process):
    """What a process writes to a file, once it is there."""
    end = time.monotonic() + SECONDS
    while not path.exists():
        ended = process.poll() is not None and not path.exists()
        assert not ended, (path.parent / "stderr").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)
    return json.loads(path.read_text())


def gone(pid):
    """Whether a process ends."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def alone(folder):
    """The tokens of the same request without ranks."""
    outputs = queue.SimpleQueue()
    host = open_host(folder, EngineConfig(kv_cache_memory_bytes=2**20, num_threads=1), outputs.put)
    host.submit(TextTask(prompt=Prompt(text="once upon"), params=SamplingParams(max_new_tokens=12, seed=3)))
    found = []
    while not (found and found[-1].last):
        found += outputs.get(timeout=SECONDS)
    host.stop(1.0)
    return [token.id for output in found for token in output.delta.tokens]


def test_a_host_whose_rank_is_killed_says_so_and_leaves_no_process(host, folder):
    first, process, place = host
    assert first["tokens"] == alone(folder)
    assert "tensor_parallel_size" in first["refused"]
    (rank,) = first["pids"]["ranks"]
    os.kill(rank, signal.SIGKILL)
    last = read(place / "last.json", process)
    assert last["tokens"] == []
    assert "ended" in last["error"]
    assert last["lost"] == 1
    assert process.wait(SECONDS) == 0
    assert gone(rank)


def test_ranks_end_when_their_host_is_killed(host):
    first, process, _ = host
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(gone(rank) for rank in first["pids"]["ranks"])


def test_what_cannot_be_split_is_refused_before_anything_starts(folder, tmp_path):
    def told(place, kind=InvalidValue, **values):
        with pytest.raises(kind) as error:
            require_tensor_parallel(place, EngineConfig(**{"tensor_parallel_size": 2, **values}))
        return error.value.message

    assert told(folder, tensor_parallel_size=3).startswith("tensor_parallel_size: 3 is not allowed; allowed: a divisor")
    for form in ("int8", "fp8"):
        assert f"quantization: {form!r}" in told(folder, quantization=form)
    assert "kv_offload_bytes: 9" in told(folder, kv_offload_bytes=9)
    assert "'lightning'" in told(saved(tmp_path / "other", mechanism="lightning"), Incompatible)
    few = saved(tmp_path / "few", mechanism="gqa", num_kv_heads=2)
    assert "2 key/value heads" in told(few, tensor_parallel_size=4)
    require_tensor_parallel(few, EngineConfig(tensor_parallel_size=2))
    assert not torch.distributed.is_initialized()


def test_more_threads_than_cores_are_used_and_said_once_by_name(caplog):
    cores = usable_cores()
    assert rank_threads(EngineConfig(num_threads=cores)) == cores
    assert not caplog.records
    assert [rank_threads(EngineConfig(num_threads=cores + 1)) for _ in range(3)] == [cores + 1] * 3
    (record,) = caplog.records
    assert "num_threads" in record.getMessage()
    assert record.args[:2] == (cores + 1, cores)
