"""What the workers that write a checkpoint together tell each other: short texts, and what failed in one of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from attn_core.errors import AttnError, CheckpointWriteFailed


def leads(group: dist.ProcessGroup | None) -> bool:
    """Whether this worker is the first of a group, or alone."""
    return group is None or dist.get_rank(group) == 0


def texts_of_all(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The texts of all workers of a group, by rank; every one calls this. The text itself where there is none."""
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
    """Raise in every worker what failed in one of them; every one calls this."""
    require_no_failure(failure, group, lambda text: CheckpointWriteFailed.of(target, text))


def require_no_failure(
    failure: AttnError | None, group: dist.ProcessGroup | None, of_others: Callable[[str], AttnError]
) -> None:
    """Raise in every worker what failed in one of them: `failure` here, and `of_others` of what another has said."""
    told = texts_of_all("" if failure is None else failure.message or failure.reason, group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text:
            raise of_others(f"worker {rank} said: {text}")
