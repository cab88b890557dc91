"""One worker: joins the process group if there are several, does its part of an attempt, and leaves the group.

`main` is the entry point of a worker process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from attn_core.errors import Unavailable, cleaning_up
from attn_models.device import resolve_device
from attn_schema.child_process import Parent
from attn_schema.training import JobError

from attn_train.attempt import RECEIVED, Assignment, Flush, Lost, Message, Outcome, SendMessage, Sent, WorkerTask
from attn_train.distributed_group import DistributedGroup
from attn_train.layout import MeshLayout
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import Stop, StopFlag
from attn_train.worker import work

GROUP_TIMEOUT_SECONDS = 600.0
"""Timeout of the process group, at start and in collectives; long enough for the final evaluation of one worker."""

LOOPBACK = "127."


def work_in_group(
    assignment: Assignment,
    rank: int,
    address: str,
    channel: tuple[SendMessage, Callable[[], None]],
    stop: StopFlag,
) -> Outcome:
    """Run this worker's part of an attempt, in the process group at `address`, HOST:PORT.

    `channel` is a function that sends a message, and one that waits until all have been received; only the leading
    worker sends messages. Errors become the outcome and are not raised.
    """
    config = assignment.config
    device = resolve_device(config.device)
    if address.startswith(LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=config.workers,
            timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
        )
    except (RuntimeError, dist.DistError) as error:
        return Lost(
            error=JobError.of(Unavailable(f"the process group of the workers could not be initialized: {error}"))
        )
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = DistributedGroup(MeshLayout.of(config), device.type)
        send, flush = channel if group.leads else (_discarded, _nothing)
        return work(assignment, send, stop, flush, group)
    finally:
        with cleaning_up("the process group"):
            dist.destroy_process_group()


def _discarded(message: Message) -> None:
    """Discard a message: all workers report the same, and only the leading worker's messages are sent."""
    del message


def _nothing() -> None:
    """Do nothing, as no messages were sent."""


def main() -> None:
    """Do the part of an attempt that the parent of this process sends."""
    keep_freed_memory()
    parent, flag, received = Parent(), StopFlag(), threading.Semaphore(0)
    task = parent.task(WorkerTask)

    def follow(said: str) -> None:
        if said == RECEIVED:
            received.release()
        else:
            flag.set(Stop(said))

    parent.follow(str, follow)

    def send(message: Message) -> None:
        parent.send(Sent.of(message))

    def flush() -> None:
        parent.send(Sent.of(Flush()))
        received.acquire()

    assignment = Assignment.from_mapping(task.assignment)
    if assignment.config.workers == 1:
        outcome = work(assignment, send, flag, flush)
    else:
        outcome = work_in_group(assignment, task.rank, task.address, (send, flush), flag)
    parent.send(Sent.of(outcome))
    # Threads of gloo and of torch that are still alive when Python ends can end the process with an error.
    os._exit(0)
