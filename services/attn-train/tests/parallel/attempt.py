"""One worker of a group, which does its part of an attempt at a job. Run by test_group_stalls.py.

    python attempt.py RANK FOLDER

`FOLDER/attempt.json` has the config of the job, the home of each worker and the URL of artefacts. A worker writes what
it sends to `FOLDER/sent-RANK.jsonl`, a line for each message, and its outcome to `FOLDER/outcome-RANK.json`. A file
`FOLDER/stop` asks the leading one to stop.
"""

import json
import os
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from attn_schema.training import TrainingConfig
from attn_train import stalls
from attn_train.attempt import Assignment
from attn_train.distributed_group import DistributedGroup
from attn_train.layout import MeshLayout
from attn_train.model import resolved
from attn_train.records import Stop, StopFlag
from attn_train.worker import work


class FlagOfFile(StopFlag):
    def __init__(self, path):
        self.path = path

    def get(self):
        return Stop.SAVE if self.path.exists() else None


def main():
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    told = json.loads((folder / "attempt.json").read_text())
    stalls.FIRST_WAIT, stalls.LONGEST_WAIT = 0.05, 0.2
    torch.set_num_threads(1)
    config = resolved(TrainingConfig.from_mapping(told["config"]))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=config.workers)
    home, artifacts = Path(told["homes"][rank]), told.get("artifacts")
    assignment = Assignment(job_id="job", attempt=1, config=config, home=home, threads=1, artifacts=artifacts)
    with (folder / f"sent-{rank}.jsonl").open("a") as file:

        def send(message):
            file.write(json.dumps([type(message).__name__, msgspec.to_builtins(message)]) + "\n")
            file.flush()

        flag = StopFlag() if rank else FlagOfFile(folder / "stop")
        outcome = work(assignment, send, flag, group=DistributedGroup(MeshLayout.of(config), "cpu"))
    text = json.dumps([type(outcome).__name__, msgspec.to_builtins(outcome)])
    (folder / f"outcome-{rank}.json").write_text(text)
    dist.barrier()
    # Threads of gloo and of torch that are still alive when Python ends can end the process with an error.
    os._exit(0)


if __name__ == "__main__":
    main()
