"""Cross-entropy of rows of logits, and its gradients in the place of the logits."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rowwise.rows import starts_of


@triton.jit
def judge_rows(call):
    """The loss of a row z of V logits and an id t, and dloss / dz; s is the smoothing. Grid: rows.

    loss = ln Σ e^z - (1 - s) z_t - s mean(z),   dloss / dz = softmax(z) - (1 - s) [t] - s / V
    """
    start = starts_of(call.logits, tl.program_id(0))
    chosen = tl.load(call.ids + tl.program_id(0))
    counts = chosen != call.ignored
    known = (chosen >= 0) & (chosen < call.tile.size)
    said = capped(tl.load(start + chosen, mask=known & counts, other=0.0).to(tl.float32), call.cap)
    most, total, mean = sums_of(call, start)
    # Differences of logits first: large ones would swallow the logarithm.
    whole = tl.log(total)
    loss = whole + (1 - call.smoothing) * (most - said)
    if call.smoothing > 0:
        loss += call.smoothing * (most - mean)
    loss = tl.where(known, loss, float("nan"))
    tl.store(call.losses + tl.program_id(0), tl.where(counts, loss, 0.0))
    if call.gradients:
        # Every thread has read the logit of the id before any overwrites it.
        tl.debug_barrier()
        for first in range(0, call.tile.size, call.tile.width):
            columns = first + tl.arange(0, call.tile.width)
            inside = columns < call.tile.size
            logits = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
            bounded = capped(logits, call.cap)
            change = tl.exp(bounded - most - whole) - call.smoothing / call.tile.size
            change -= tl.where(columns == chosen, 1 - call.smoothing, 0.0)
            if call.cap is not None:
                change *= 1 - (bounded / call.cap) * (bounded / call.cap)
            change = tl.where(counts, tl.where(known, change, float("nan")), 0.0)
            tl.store(start + columns, change.to(call.logits.data.dtype.element_ty), mask=inside)


@triton.jit
def sums_of(call, start):
    """The largest logit m, Σ e^(z - m), and the mean of z where it is asked for."""
    most, total, sum_of_all = float("-inf"), 0.0, 0.0
    for first in range(0, call.tile.size, call.tile.width):
        columns = first + tl.arange(0, call.tile.width)
        inside = columns < call.tile.size
        logits = capped(tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32), call.cap)
        logits = tl.where(inside, logits, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, 0))
        # Where all logits so far are -inf, nothing may be taken off them.
        known = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - known) + tl.sum(tl.exp(logits - known), 0)
        most = larger
        if call.smoothing > 0:
            sum_of_all += tl.sum(tl.where(inside, logits, 0.0), 0)
    return most, total, sum_of_all / call.tile.size


@triton.jit
def capped(logits, cap):
    """cap · tanh(logits / cap), or the logits; tanh by way of e^-2|x|, which cannot overflow."""
    if cap is not None:
        small = tl.exp(-2 * tl.abs(logits / cap))
        size = cap * (1 - small) / (1 + small)
        logits = tl.where(logits < 0, -size, size)
    return logits
