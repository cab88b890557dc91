"""The work of one worker of a group: meeting the others, its part of an attempt, and parting."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from attn_core.errors import Unavailable
from attn_models.device import resolve_device
from attn_schema.training import JobError

from attn_train.attempt import Assignment, Lost, Message, Outcome, SendMessage
from attn_train.layout import MeshLayout
from attn_train.records import StopFlag
from attn_train.together import Together
from attn_train.worker import work

MEETING_SECONDS = 600.0
"""How long workers wait for each other, when they start and in a step; as long as a last measurement may take."""

LOOPBACK = "127."


def work_in_group(
    assignment: Assignment,
    rank: int,
    address: str,
    channel: tuple[SendMessage, Callable[[], None]],
    stop: StopFlag,
) -> Outcome:
    """Run this worker's part of an attempt with the others that come to `address`, HOST:PORT.

    `channel` sends messages, and waits until all have been received; of a worker that does not lead, nothing is sent.
    Errors become the outcome and are not raised.
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
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
    except (RuntimeError, dist.DistError) as error:
        return Lost(error=JobError.of(Unavailable(f"the workers did not meet: {error}")))
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group = Together(MeshLayout.of(config), device.type)
        send, flush = channel if group.leads else (_discarded, _nothing)
        return work(assignment, send, stop, flush, group)
    finally:
        dist.destroy_process_group()


def _discarded(message: Message) -> None:
    """Of what all workers report alike, the leading one's counts."""
    del message


def _nothing() -> None:
    """Nothing was sent."""
