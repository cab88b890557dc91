"""A kernel by name for every attention layer of a model."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import Incompatible


def use_kernel(model: Any, name: str | None) -> None:
    """Compute all attention with the kernel called `name`, or let dispatch choose where it is None.

    Runs one token, after the longest source where the model reads one, so that a kernel that refuses raises
    `KernelRefused` here and not in the first request.
    """
    if name is not None:
        choosers = [getattr(module, "use_kernel", None) for module in model.modules()]
        chosen = [choose for choose in choosers if choose is not None]
        if not chosen:
            raise Incompatible("no attention of this model is computed by kernels", kernel=name)
        for choose in chosen:
            choose(name)
        if hasattr(model, "take_apart"):
            model.take_apart()  # a kernel of whole blocks has an attention of its own
    with torch.inference_mode():
        one = torch.zeros(1, 1, dtype=torch.int64)
        # A whole source: images are no other number of tokens.
        longest = getattr(model, "source_context", None)
        model(one) if longest is None else model(one, one.expand(1, longest))
