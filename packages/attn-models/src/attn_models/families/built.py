"""Models that are built without memory: none larger than its file, and none with a hole."""

from __future__ import annotations

from typing import Any

from attn_core.errors import CheckpointInvalid
from torch import nn

from attn_models.weights import CheckpointFolder


def refuse_giants(checkpoint: CheckpointFolder, config: Any) -> None:
    """A config larger than the file could fill must not take memory or time; raises `CheckpointInvalid`."""
    entries = checkpoint.tensors.entries
    largest = max((size for entry in entries.values() for size in entry.shape), default=0)
    limits = {"vocabulary": largest, "width": largest, "layers": len(entries), "heads": largest, "hidden": largest}
    for field, limit in limits.items():
        value = getattr(config, field, None)
        if value is not None and value > limit:
            rule = f"{field} {value} is more than the tensors hold ({limit})"
            raise CheckpointInvalid.of(checkpoint.path / "config.json", rule)


def fill_constants(model: nn.Module, fresh: nn.Module) -> None:
    """Give values to buffers that no checkpoint holds, from a model of the same config that was built with memory."""
    values = dict(fresh.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_buffer(leaf, values[name], persistent=False)
