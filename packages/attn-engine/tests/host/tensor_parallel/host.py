"""A host of two ranks: FOLDER OUT. Writes what it computes and its processes to OUT/first.json, waits until it is
killed or a rank has ended, and then writes how it answers to OUT/last.json."""

import json
import os
import queue
import sys
import time
from pathlib import Path

from attn_core.errors import Incompatible
from attn_engine.client import TextTask
from attn_engine.host.engine import EngineHost
from attn_engine.host.rank_processes import RankProcesses
from attn_engine.host.ranks import RankGroup
from attn_schema import EngineConfig, Prompt, SamplingParams


def answered(host, outputs):
    """The tokens of a prompt, and the error that ends it."""
    host.submit(TextTask(prompt=Prompt(text="once upon"), params=SamplingParams(max_new_tokens=12, seed=3)))
    found = []
    while not (found and found[-1].last):
        found += outputs.get()
    error = found[-1].error
    return [token.id for output in found for token in output.delta.tokens], None if error is None else error.message


def refused(host):
    """What a host of several ranks says to what it cannot do."""
    try:
        host.load_adapter("some", Path("nowhere"))
    except Incompatible as error:
        return error.message


def write(path, values):
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").rename(path)


def main(folder, out):
    outputs, launcher, lost = queue.SimpleQueue(), RankProcesses(), []
    config = EngineConfig(kv_cache_memory_bytes=2**20, tensor_parallel_size=2, num_threads=1)

    def open_ranks(folder, config):
        return RankGroup(folder, config, launcher, lost.append)

    host = EngineHost(folder, config, outputs.put, open_ranks)
    tokens, _ = answered(host, outputs)
    pids = {"own": os.getpid(), "ranks": launcher.pids()}
    write(out / "first.json", {"tokens": tokens, "pids": pids, "refused": refused(host)})
    while host.alive:
        time.sleep(0.02)
    tokens, error = answered(host, outputs)
    host.stop(1.0)
    write(out / "last.json", {"tokens": tokens, "error": error, "lost": len(lost), "left": launcher.ended()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
