"""Cross-entropy losses, and one of a linear layer that never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.rowwise import CrossEntropyKernel, Targets, row_result
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap), or the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def mean_loss(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """The mean, in nats, of `ids` [...] under logits [..., vocabulary], over those that are not ignored."""
    return functional.cross_entropy(
        capped(logits, targets.cap).flatten(0, -2),
        ids.flatten(),
        ignore_index=targets.ignored,
        label_smoothing=targets.smoothing,
    )


def losses(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """Losses [rows], in float32 at least, of `ids` [rows] under logits [rows, vocabulary]."""
    return functional.cross_entropy(
        capped(wide(logits), targets.cap),
        ids,
        ignore_index=targets.ignored,
        label_smoothing=targets.smoothing,
        reduction="none",
    )


def row_losses_and_gradients(logits: Tensor, ids: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The same, and the gradient of each row's loss [rows, vocabulary] in the type of the logits."""
    bounded = capped(wide(logits), targets.cap)
    counts = ids != targets.ignored
    known = ids.where(counts, 0)[:, None]
    logs = torch.log_softmax(bounded, dim=-1)
    found = -logs.gather(1, known)[:, 0] * (1 - targets.smoothing)
    if targets.smoothing:
        found -= targets.smoothing * logs.mean(-1)
    change = logs.exp_().sub_(targets.smoothing / logs.shape[-1])
    change.scatter_add_(1, known, change.new_full(known.shape, targets.smoothing - 1))
    if targets.cap is not None:
        change *= 1 - (bounded / targets.cap).square()
    return found.where(counts, 0), change.masked_fill_(~counts[:, None], 0).to(logits.dtype)


def wide(logits: Tensor) -> Tensor:
    """Logits in float32 at least."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def doubly_stochastic_penalty(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Σ_b Σ_i (1 - Σ_t α_bti)²: each key is to be seen once in all (Xu et al. 2015, arXiv 1502.03044, equation 14).

    `weights` [batch, heads, query, key], whose mean over the heads is α; `queries` [batch, query] and `keys` [batch,
    key], bool, say which of them count. A scalar.
    """
    seen = (weights.mean(1) * queries[..., None]).sum(1)
    return ((1 - seen).square() * keys).sum()


LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits that are held at once, by device. A CPU that can hold them all does, so that losses of small models are
torch's bit for bit."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """The mean loss, in nats, of `ids` [...], int64, after hidden rows [..., width] under a matrix [vocabulary, width].

    Where there are many logits, they are made, judged and turned into gradients a part at a time. On a CPU, raises
    `InvalidValue` for ids outside the vocabulary that are not ignored; elsewhere, where looking would hold up the
    device, the loss is NaN.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    if torch.compiler.is_compiling():
        return mean_loss(nn.functional.linear(rows, weight), ids, targets)
    vocabulary = weight.shape[0]
    counts = ids != targets.ignored
    wrong = counts & ((ids < 0) | (ids >= vocabulary))
    if ids.device.type == "cpu" and wrong.any():
        allowed = f"0 to {vocabulary - 1}, or {targets.ignored}, which is ignored"
        raise InvalidValue.of("ids", int(ids[wrong][0]), allowed)
    if rows.device.type == "cpu" and rows.shape[0] * vocabulary <= LOGITS["cpu"]:
        return mean_loss(nn.functional.linear(rows, weight), ids, targets)
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total: Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, known_ids(ids, wrong, targets).flatten(), targets, gradients
    )
    mean = total / counts.sum()
    return mean if ids.device.type == "cpu" else torch.where(wrong.any(), torch.nan, mean)


def known_ids(ids: Tensor, wrong: Tensor, targets: Targets) -> Tensor:
    """The ids, on other devices than a CPU without those that are wrong: a GPU that meets one there stops for good."""
    return ids if ids.device.type == "cpu" else ids.masked_fill(wrong, targets.ignored)


def of_one_type(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type in which torch would multiply them: that of autocast, where it is on."""
    if not torch.is_autocast_enabled(rows.device.type):
        return rows, weight
    dtype = torch.get_autocast_dtype(rows.device.type)
    return rows.to(dtype), weight.to(dtype)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices of one type, in `dtype`, which may be wider; on a GPU it is rounded to that alone."""
    if left.dtype is dtype:
        return left @ right
    if sums_apart(left, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def sums_apart(operand: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch gives a product of such matrices in the type that a GPU sums it in, without rounding it before."""
    return operand.device.type == "cuda" and dtype is torch.float32


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses; gradients are made together with it, while logits are there, and scaled afterwards.

    Products are of the type that autocast asks for, gradients of that of rows and weight.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ids: Tensor, targets: Targets, gradients: bool) -> Tensor:  # noqa: FBT001 -- apply takes no names
        """Go through rows [rows, width] part by part."""
        wanted = [gradients and need for need in ctx.needs_input_grad[:2]]
        changed = torch.empty_like(rows) if wanted[0] else None
        summed = Summed(weight) if wanted[1] else None
        ctx.dtype = weight.dtype
        rows, weight = of_one_type(rows, weight)
        length = max(1, LOGITS.get(rows.device.type, LOGITS["cuda"]) // weight.shape[0])
        total = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        with torch.autocast(rows.device.type, enabled=False):
            for some in (slice(start, start + length) for start in range(0, rows.shape[0], length)):
                found, change = chunk_losses(rows[some] @ weight.T, ids[some], targets, gradients=any(wanted))
                total += found.sum()
                if changed is not None and change is not None:
                    product_into(changed[some], change, weight)
                if summed is not None and change is not None:
                    summed.add(change, rows[some])
        ctx.save_for_backward(changed, None if summed is None else summed.total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """What was made, scaled."""
        changed, summed = ctx.saved_tensors
        # In the type of the sum, float32 at least: a mean over many rows is too small a factor for fewer bits.
        to_rows = None if changed is None else (changed.to(scale.dtype) * scale).to(changed.dtype)
        to_weight = None if summed is None else (summed * scale).to(ctx.dtype)
        return to_rows, to_weight, None, None, None


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write the product of two matrices of one type into `out`, whose type may be wider."""
    if out.dtype is left.dtype:
        torch.mm(left, right, out=out)
    elif sums_apart(left, out.dtype):
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)


class Summed:
    """Σ change^T rows, [vocabulary, width]: in float32 at least, also where parts of fewer bits are added."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def add(self, change: Tensor, rows: Tensor) -> None:
        """Add what a part of the rows gives."""
        if self.total.dtype == rows.dtype:
            self.total.addmm_(change.T, rows)
        else:
            self.total += wide_product(change.T, rows, self.total.dtype)


def chunk_losses(logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> tuple[Tensor, Tensor | None]:
    """Losses [rows] of logits [rows, vocabulary], which may be overwritten, and their gradients where wanted."""
    found = row_result(
        CrossEntropyKernel, "plain", lambda kernel: kernel.losses(logits, ids, targets, gradients=gradients), logits
    )
    if found is not None:
        return found, logits if gradients else None
    return row_losses_and_gradients(logits, ids, targets) if gradients else (losses(logits, ids, targets), None)
