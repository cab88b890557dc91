"""One worker of a group, which trains what it is told and writes its losses. Run by test_groups.py.

    python rank.py RANK WORKERS FOLDER

`FOLDER/runs.json` lists runs: a name, a config, the element type of the model, the folder of its checkpoints, and
whether its first weights are nudged, each by about one in its last place. A run with one worker is the leading one's
alone. The leading worker writes `FOLDER/NAME.json`: losses, gradient norms, and the error if there was one.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from attn_core.errors import AttnError
from attn_schema.training import TrainingConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.data.load import load_dataset
from attn_train.layout import MeshLayout
from attn_train.model import resolved
from attn_train.process_group import Group
from attn_train.records import StopFlag
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model


class Losses(NullReporter):
    def __init__(self):
        self.found = {}

    def metrics(self, step, values):
        self.found[step] = dict(values)


def built(config, dataset, dtype, nudged=False):
    model = build_model(config, dataset).to(dtype)
    if nudged:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.finfo(dtype).eps)
    return model


def trained(run, home):
    config = resolved(TrainingConfig.from_mapping(run["config"]))
    dataset = load_dataset(config, home, lambda _: None)
    dtype = getattr(torch, run["dtype"])
    if config.workers > 1:
        from attn_train.distributed_group import DistributedGroup

        group = DistributedGroup(MeshLayout.of(config), "cpu")
    else:
        group = Group()
    folder = run.get("checkpoints")
    checkpoints = None if folder is None else CheckpointFolder(Path(folder))
    make = partial(built, config, dataset, dtype, run.get("nudged", False))
    trainer = Trainer(make(), dataset, config, checkpoints=checkpoints, group=group, rebuild=make)
    trainer.resume()
    losses = Losses()
    trainer.run(losses, StopFlag())
    whole = trainer.whole_model()
    if whole is None:
        return None
    total = sum(parameter.double().square().sum().item() for parameter in whole.parameters())
    return {"metrics": losses.found, "weights": total}


def main():
    rank, workers, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=workers)
    for run in json.loads((folder / "runs.json").read_text()):
        if rank and run["config"].get("workers", 1) == 1:
            continue
        try:
            found = trained(run, folder)
        except AttnError as error:
            found = {"error": f"{error.reason}: {error.message}"}
        if rank == 0:
            (folder / f"{run['name']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    if workers > 1:
        dist.barrier()
    # Threads of gloo and of torch that are still alive when Python ends can end the process with an error.
    os._exit(0)


if __name__ == "__main__":
    main()
