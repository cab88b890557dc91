"""Collectives for workers that write a checkpoint together: they exchange short texts and agree on failures."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from attn_core.errors import AttnError, CheckpointWriteFailed


def leads(group: dist.ProcessGroup | None) -> bool:
    """Whether this worker is rank 0 of the group; True without a group."""
    return group is None or dist.get_rank(group) == 0


def texts_of_all(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Gather the texts of all workers of a group, in order of rank; without a group, return `[text]`.

    A collective: every worker of the group must call it.
    """
    if group is None:
        return [text]
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
    padded[: len(own)] = own
    found = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=group)
    return [bytes(data[: int(length)].tolist()).decode() for data, length in zip(found, lengths, strict=True)]


def require_agreed(failure: AttnError | None, target: object, group: dist.ProcessGroup | None) -> None:
    """Raise an error in every worker if any of them failed: its own `failure`, else `CheckpointWriteFailed`.

    A collective: every worker of the group must call it.
    """
    require_no_failure(failure, group, lambda text: CheckpointWriteFailed.of(target, text))


def require_no_failure(
    failure: AttnError | None, group: dist.ProcessGroup | None, of_others: Callable[[str], AttnError]
) -> None:
    """Raise an error in every worker if any of them failed: its own `failure`, else `of_others(message)`.

    A collective: every worker of the group must call it.
    """
    told = texts_of_all("" if failure is None else failure.message or failure.reason, group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text:
            raise of_others(f"worker {rank} said: {text}")
