"""Collectives for workers that write a checkpoint together: they exchange short texts and agree on failures."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from attn_core.errors import AttnError, CheckpointWriteFailed


def leads(group: dist.ProcessGroup | None) -> bool:
    """Whether this worker is rank 0 of the group; True without a group."""
    return group is None or dist.get_rank(group) == 0


def all_gather_texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Gather the texts of all workers of a group, in order of rank; without a group, return `[text]`.

    A collective: every worker of the group must call it.
    """
    if group is None:
        return [text]
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    max_length = max(int(length) for length in lengths)
    padded = torch.zeros(max(max_length, 1), dtype=torch.uint8)
    padded[: len(own)] = own
    gathered = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(data[: int(length)].tolist()).decode() for data, length in zip(gathered, lengths, strict=True)]


def require_no_write_failure(failure: AttnError | None, target: object, group: dist.ProcessGroup | None) -> None:
    """Raise an error in every worker if any of them failed: its own `failure`, else `CheckpointWriteFailed`.

    A collective: every worker of the group must call it.
    """
    require_no_failure(failure, group, lambda text: CheckpointWriteFailed.of(target, text))


def require_no_failure(
    failure: AttnError | None, group: dist.ProcessGroup | None, error_for_others: Callable[[str], AttnError]
) -> None:
    """Raise an error in every worker if any of them failed: its own `failure`, else `error_for_others(message)`.

    A collective: every worker of the group must call it.
    """
    messages = all_gather_texts("" if failure is None else failure.message or failure.reason, group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(messages):
        if text:
            raise error_for_others(f"worker {rank} failed: {text}")
