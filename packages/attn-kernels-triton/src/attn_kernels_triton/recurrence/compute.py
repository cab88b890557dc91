"""Linear recurrences by chunks, with gradients, and token by token, without."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_core.first_order import first_order_only
from attn_core.kernels.recurrence import Decay, Steps
from torch import Tensor

from attn_kernels_triton.backends.conditions import MAX_KEY_SIZE, MAX_KEY_SIZE_PER_CHANNEL
from attn_kernels_triton.checks import check_count, check_like
from attn_kernels_triton.launch import addressable, laid, specialized, warm_up_backward
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.recurrence.launch import (
    Given,
    buffers_of,
    decode_launch,
    forward_launches,
    run_backward,
    spaced,
)
from attn_kernels_triton.recurrence.tiles import CHUNKS

SCAN_DTYPES = (torch.float32, torch.bfloat16)


def check_steps(steps: Steps, before: Tensor | None) -> None:
    """Raise `InvalidValue` for steps whose shapes, dtypes, devices or sizes the kernels do not support."""
    check_key(steps.key, steps.fades)
    batch, tokens, heads, size = steps.key.shape
    width = steps.value.shape[-1]
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "query": (steps.query, (batch, tokens, heads, size)),
        "value": (steps.value, (batch, tokens, heads, width)),
        "strength": (steps.strength, (batch, tokens, heads)),
        "before": (before, (batch, heads, size, width)),
    }
    if steps.decay is not None:
        sequences, channels = steps.decay.shape[0], steps.decay.shape[-1]
        allowed = (batch if sequences == batch else 1, tokens, heads, size if channels != 1 else 1)
        expected["decay"] = steps.decay, allowed
    for name, (part, shape) in expected.items():
        if part is None:
            continue
        check_like(name, part, shape, steps.key.device)
        wide = name in {"strength", "before", "decay"}
        if part.dtype != steps.key.dtype and not (wide and part.dtype == torch.float32):
            kinds = f"{steps.key.dtype}, as the keys" + (", or float32" if wide else "")
            raise InvalidValue.of(f"{name}.dtype", str(part.dtype), kinds)
    check_count("elements of the states of a head", (tokens // 16 + 1) * size * width)
    # Buffers that kernels write are contiguous, with rows of at least 64 elements.
    check_count("elements of a sequence", tokens * heads * max(size, width, *CHUNKS.values()))
    for name, rows in (("query", steps.query), ("key", steps.key), ("value", steps.value)):
        check_count(f"{name}: elements from the first to the last row of a head", tokens * rows.stride(1))


def check_key(key: Tensor, decay: Decay) -> None:
    """Raise `InvalidValue` unless keys are [batch, token, head, size] on a GPU, of a supported dtype and size."""
    if key.dim() != 4:
        raise InvalidValue.of("key", list(key.shape), "four axes: batch, token, head, size")
    if key.device.type != "cuda" and not interpreted():
        raise InvalidValue.of("key.device", str(key.device), "a GPU: these kernels do not run on a CPU")
    if key.dtype not in SCAN_DTYPES:
        raise InvalidValue.of("key.dtype", str(key.dtype), "float32 or bfloat16")
    apart = decay == "channel" or key.dtype == torch.float32
    widest = MAX_KEY_SIZE_PER_CHANNEL if apart else MAX_KEY_SIZE
    if key.shape[3] > widest:
        raise InvalidValue.of("key", list(key.shape), f"a last axis of at most {widest} for this dtype and decay")


class ByChunks(torch.autograd.Function):
    """The outputs and the final state of `Given`, with gradients of all its tensors."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the forward kernels."""
        given = Given(*parts)  # type: ignore[arg-type]
        work = buffers_of(given)
        for launch in forward_launches(given, work):
            launch.run(given.key.device)
        ctx.save_for_backward(*parts)
        ctx.set_materialize_grads(False)
        return work.out, work.after

    @staticmethod
    @first_order_only
    def backward(ctx: Any, out: Tensor | None, after: Tensor | None) -> tuple[Tensor | None, ...]:
        """Recompute the states and run the backward kernels."""
        given = Given(*ctx.saved_tensors)
        change = torch.zeros_like(given.value) if out is None else out
        found = run_backward(given, change, after, buffers_of(given), decays=ctx.needs_input_grad[3])
        return (
            found.query,
            found.key,
            found.value,
            None if given.decay is None or found.decay is None else to_decay(given.decay, found.decay),
            None if given.strength is None or found.strength is None else found.strength.to(given.strength.dtype),
            None if given.before is None or found.before is None else found.before.to(given.before.dtype),
        )


def to_decay(decay: Tensor, found: Tensor) -> Tensor:
    """Reduce the gradient `found` [batch, tokens, heads, channels or parts] to the shape and dtype of the log
    decays."""
    if decay.shape[-1] == 1:
        found = found.sum(-1, keepdim=True)
    if decay.shape[0] != found.shape[0]:
        found = found.sum(0, keepdim=True)
    return found.to(decay.dtype)


def given_of(steps: Steps, before: Tensor | None) -> Given:
    """The tensors of a call in a layout that kernels can address; raises `InvalidValue`, see `check_steps`."""
    check_steps(steps, before)
    if steps.strength is not None:
        steps = steps._replace(strength=spaced(steps.strength[..., None]))
    return Given(*(None if part is None else addressable(part) for part in (*steps, before)))  # type: ignore[arg-type]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_chunks(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [batch, tokens, heads, value_size] in the dtype of the steps and the final state, float32.

    `before` is the initial state, None for zero. Raises `InvalidValue`, see `check_steps`.
    """
    given = given_of(steps, before)
    if not given.sizes.tokens:
        return steps.value, steps.nothing().float() if before is None else before.float()
    decays = given.decay is not None and given.decay.requires_grad
    warm_up_backward(
        given,
        backward_kind(given, decays=decays),
        lambda: run_backward(given, torch.zeros_like(given.value), None, buffers_of(given), decays=decays),
    )
    out, after = ByChunks.apply(*given)  # type: ignore[no-untyped-call]
    return out, after


def backward_kind(given: Given, *, decays: bool) -> tuple[Hashable, ...]:
    """Everything that the backward kernels are specialized on."""
    sizes = given.sizes
    kinds = (None if part is None else part.dtype for part in given)
    numbers = sizes.key_size, sizes.value_size, sizes.channels, *specialized(sizes.tokens)
    return "recurrence", *kinds, *laid(*given), *numbers, decays


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_token(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like `by_chunks`, but token by token and without gradients: for one or a few tokens."""
    given = given_of(steps, before)
    if not given.sizes.tokens:
        return steps.value, steps.nothing().float() if before is None else before.float()
    out, after = given.rows(given.sizes.value_size), given.state()
    decode_launch(given, out, after).run(out.device)
    return out, after
