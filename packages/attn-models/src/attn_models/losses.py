"""Cross-entropy losses, among them one fused with the unembedding that never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_core.first_order import first_order_only
from attn_core.kernels.rowwise import CrossEntropyKernel, Targets, row_result
from torch import Tensor, nn
from torch.nn import functional


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap), or the logits unchanged if `cap` is None."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def mean_cross_entropy(logits: Tensor, ids: Tensor, ignored: int, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy, in nats, of `ids` [...] under logits [..., vocabulary], over ids that are not `ignored`.

    If all are, it is 0 with gradients of 0, where torch's is NaN. `smoothing` is the share of label smoothing.
    """
    if not ids.numel():
        return logits.sum() * 0
    # No synchronisation with a GPU: without any target, the ids are replaced by one that counts, and its loss by 0.
    none = (ids == ignored).all()
    loss = functional.cross_entropy(
        logits.flatten(0, -2),
        ids.masked_fill(none, 0).flatten(),
        ignore_index=ignored,
        label_smoothing=smoothing,
    )
    return loss * ~none


def mean_loss(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """The mean cross-entropy, in nats, of `ids` [...] under logits [..., vocabulary], over ids that are not ignored; 0
    if all are."""
    return mean_cross_entropy(capped(logits, targets.cap), ids, targets.ignored, targets.smoothing)


def losses(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """Cross-entropies [rows], at least in float32, of `ids` [rows] under logits [rows, vocabulary]; 0 if ignored."""
    return functional.cross_entropy(
        capped(at_least_float32(logits), targets.cap),
        ids,
        ignore_index=targets.ignored,
        label_smoothing=targets.smoothing,
        reduction="none",
    )


def row_losses_and_gradients(logits: Tensor, ids: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The result of `losses`, and the gradient of each row's loss [rows, vocabulary] in the dtype of the logits."""
    bounded = capped(at_least_float32(logits), targets.cap)
    counts = ids != targets.ignored
    known = ids.where(counts, 0)[:, None]
    logs = torch.log_softmax(bounded, dim=-1)
    found = -logs.gather(1, known)[:, 0] * (1 - targets.smoothing)
    if targets.smoothing:
        found -= targets.smoothing * logs.mean(-1)
    gradients = logs.exp_().sub_(targets.smoothing / logs.shape[-1])
    gradients.scatter_add_(1, known, gradients.new_full(known.shape, targets.smoothing - 1))
    if targets.cap is not None:
        gradients *= 1 - (bounded / targets.cap).square()
    return found.where(counts, 0), gradients.masked_fill_(~counts[:, None], 0).to(logits.dtype)


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits, converted to float32 if their dtype is narrower."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def doubly_stochastic_penalty(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Σ_b Σ_i (1 - Σ_t α_bti)², a scalar, which is 0 if the weights of each key sum to one over all queries (Xu et al.
    2015, arXiv 1502.03044, equation 14).

    α is the mean over heads of `weights` [batch, heads, query, key]; `queries` [batch, query] and `keys` [batch, key],
    bool, mark those that count.
    """
    seen = (weights.mean(1) * queries[..., None]).sum(1)
    return ((1 - seen).square() * keys).sum()


LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""The largest number of logits that are held at once, by device. On a CPU, losses with fewer are computed by torch's
own cross-entropy, bit for bit."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """The mean loss, in nats, of `ids` [...], int64, for `hidden` [..., width] with unembedding `weight` [vocabulary,
    width].

    The loss is 0, with gradients of 0, if all ids are ignored. If there are many logits, they, their losses and their
    gradients are computed in chunks. For ids outside the vocabulary that are not ignored, it raises `InvalidValue` on a
    CPU; on other devices, where the check would need a synchronisation, the loss is NaN.
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
    total = _row_losses(rows, weight, mask_wrong_ids(ids, wrong, targets).flatten(), targets).sum()
    mean = total / counts.sum().clamp(min=1)
    return mean if ids.device.type == "cpu" else torch.where(wrong.any(), torch.nan, mean)


def linear_losses(rows: Tensor, weight: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """Like `linear_cross_entropy`, but the loss of each of the `rows` [rows, width], at least in float32 [rows]; all
    logits are held at once if `weight` is trained, or if there are few."""
    trained = torch.is_grad_enabled() and weight.requires_grad
    if trained or rows.shape[0] * weight.shape[0] <= LOGITS.get(rows.device.type, LOGITS["cuda"]):
        return losses(nn.functional.linear(rows, weight), ids, targets)
    return _row_losses(rows, weight, ids, targets)


def _row_losses(rows: Tensor, weight: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    gradients = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    found: Tensor = LinearCrossEntropy.apply(rows, weight, ids, targets, gradients)  # type: ignore[no-untyped-call]
    return found


def mask_wrong_ids(ids: Tensor, wrong: Tensor, targets: Targets) -> Tensor:
    """`ids`, on a GPU with those that are `wrong` replaced by the ignored id, as an index outside the vocabulary would
    fail a device-side assertion there, after which CUDA is unusable in the process."""
    return ids if ids.device.type == "cpu" else ids.masked_fill(wrong, targets.ignored)


def in_autocast_dtype(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands in autocast's dtype if autocast is on, else unchanged."""
    if not torch.is_autocast_enabled(rows.device.type):
        return rows, weight
    dtype = torch.get_autocast_dtype(rows.device.type)
    return rows.to(dtype), weight.to(dtype)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices of the same dtype, as `dtype`, which may be wider; a float32 result on a GPU is not
    rounded to the narrower dtype first."""
    if left.dtype is dtype:
        return left @ right
    if supports_out_dtype(left, dtype):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def supports_out_dtype(operand: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch can return a product of such matrices in `dtype` without rounding it first (`out_dtype`): on CUDA,
    which sums in float32."""
    return operand.device.type == "cuda" and dtype is torch.float32


class LinearCrossEntropy(torch.autograd.Function):
    """The losses of rows. The forward pass also computes the gradients, chunk by chunk while the logits exist; the
    backward pass only scales them. If `weight` has a gradient, all losses must be scaled alike, as a sum does.

    Products are computed in autocast's dtype, if it is on; gradients have the dtypes of `rows` and `weight`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ids: Tensor, targets: Targets, gradients: bool) -> Tensor:  # noqa: FBT001 -- apply takes no names
        """The losses [rows] of `rows` [rows, width], computed chunk by chunk; saves the gradients."""
        needed = [gradients and need for need in ctx.needs_input_grad[:2]]
        row_gradients = torch.empty_like(rows) if needed[0] else None
        weight_gradient = WeightGradient(weight) if needed[1] else None
        ctx.dtype = weight.dtype
        rows, weight = in_autocast_dtype(rows, weight)
        length = max(1, LOGITS.get(rows.device.type, LOGITS["cuda"]) // weight.shape[0])
        found = [rows.new_zeros(0, dtype=torch.promote_types(rows.dtype, torch.float32))]
        with torch.autocast(rows.device.type, enabled=False):
            for chunk in (slice(start, start + length) for start in range(0, rows.shape[0], length)):
                chunk_loss, logit_gradients = chunk_losses(
                    rows[chunk] @ weight.T, ids[chunk], targets, gradients=any(needed)
                )
                found.append(chunk_loss)
                if row_gradients is not None and logit_gradients is not None:
                    product_into(row_gradients[chunk], logit_gradients, weight)
                if weight_gradient is not None and logit_gradients is not None:
                    weight_gradient.add(logit_gradients, rows[chunk])
        ctx.save_for_backward(row_gradients, None if weight_gradient is None else weight_gradient.total)
        return torch.cat(found)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the forward pass computed, times those of the losses, `scale` [rows]."""
        row_gradients, weight_gradient = ctx.saved_tensors
        to_rows = to_weight = None
        # Scaled in the dtype of the losses, at least float32: the factor 1 / rows of a mean can underflow in 16 bits.
        if row_gradients is not None:
            to_rows = (row_gradients.to(scale.dtype) * scale[:, None]).to(row_gradients.dtype)
        if weight_gradient is not None:
            to_weight = (weight_gradient * scale[:1].sum()).to(ctx.dtype)
        return to_rows, to_weight, None, None, None


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write the product of two matrices of the same dtype into `out`, whose dtype may be wider."""
    if out.dtype is left.dtype:
        torch.mm(left, right, out=out)
    elif supports_out_dtype(left, out.dtype):
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)


class WeightGradient:
    """The gradient of the unembedding, Σ change^T rows [vocabulary, width], summed over chunks in at least float32."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def add(self, logit_gradients: Tensor, rows: Tensor) -> None:
        """Add change^T rows of one chunk: the logits' gradients [rows, vocabulary] and hidden states [rows, width]."""
        if self.total.dtype == rows.dtype:
            self.total.addmm_(logit_gradients.T, rows)
        else:
            self.total += wide_product(logit_gradients.T, rows, self.total.dtype)


def chunk_losses(logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> tuple[Tensor, Tensor | None]:
    """The losses [rows] of logits [rows, vocabulary], which may be overwritten, and if `gradients` their gradients."""
    found = row_result(
        CrossEntropyKernel, "plain", lambda kernel: kernel.losses(logits, ids, targets, gradients=gradients), logits
    )
    if found is not None:
        return found, logits if gradients else None
    return row_losses_and_gradients(logits, ids, targets) if gradients else (losses(logits, ids, targets), None)
