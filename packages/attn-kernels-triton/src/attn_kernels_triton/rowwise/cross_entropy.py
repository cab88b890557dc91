"""Cross-entropy losses of logits."""

from __future__ import annotations

import torch
import triton.language as tl
from attn_core.kernels.rowwise import Targets
from torch import Tensor

from attn_kernels_triton.kernels.rowwise import Losses, judge_rows
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.rowwise.rows import LOSS_WARPS, check_logits, loss_tile, matrix


def loss_launch(logits: Tensor, ids: Tensor, found: Tensor, targets: Targets, *, gradients: bool) -> Launch:
    """The launch of the kernel over logits [row, vocabulary], ids [row] and losses `found` [row]."""
    call = Losses(
        logits=matrix(logits),
        ids=ids,
        losses=found,
        ignored=targets.ignored,
        smoothing=tl.constexpr(targets.smoothing),
        cap=None if targets.cap is None else tl.constexpr(targets.cap),
        gradients=tl.constexpr(gradients),
        tile=loss_tile(logits.shape[1]),
    )
    return Launch(program=judge_rows, programs=logits.shape[0], call=call, warps=LOSS_WARPS, stages=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def losses(logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor:
    """See `attn_core.CrossEntropyKernel.losses`; raises `InvalidValue`, see `rowwise.rows.check_logits`."""
    check_logits(logits, ids)
    found = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    loss_launch(logits, ids.contiguous(), found, targets, gradients=gradients).run(logits.device)
    return found
