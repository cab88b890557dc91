"""The packing that a server does unasked: one that changes no number."""

from __future__ import annotations

import logging
from typing import Any

import torch
from attn_core import installed
from attn_core.kernels.linear import LinearShape
from attn_core.states import dtype_name

from attn_models.packing.pack import pack_weights, packable

log = logging.getLogger(__name__)


def pack_lossless(model: Any, stored: torch.dtype) -> None:
    """Pack the weights of a model in the type that they are `stored` in, and compute in float32.

    Only a kernel that loses nothing is taken: one that widens weights to float32 and gives each row the same bits alone
    and in a crowd. Where there is none all weights become float32, unpacked, and a warning says why; so do those of a
    model of which nothing can be packed, unsaid.
    """
    if not packable(model):
        model.float()
        return
    form = dtype_name(str(stored).removeprefix("torch."))
    shape = LinearShape(inputs=model.config.width, outputs=model.config.vocabulary, dtype=form)
    kernels = [kernel for kernel in installed().linears if kernel.weights == form and kernel.exact and kernel.float32]
    reasons = {kernel: kernel.available() or kernel.refuses(shape) for kernel in kernels}
    able = [kernel for kernel, reason in reasons.items() if reason is None]
    if able:
        pack_weights(model, form, kernel=min(able, key=lambda kernel: kernel.cost()).name)
        return
    model.float()
    said = "; ".join(f"{kernel.name}: {reason}" for kernel, reason in reasons.items())
    log.warning("weights are not packed, which is slower: %s", said or "the package attn-kernels-cpu is not installed")
