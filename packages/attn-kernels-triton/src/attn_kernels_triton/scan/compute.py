"""Linear recurrences by chunks, with gradients, and token by token."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.kernels.recurrence import Steps
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_kernels_triton.launch import addressable
from attn_kernels_triton.scan.backward import backward
from attn_kernels_triton.scan.checks import check_steps
from attn_kernels_triton.scan.forward import decode_launch, forward_launches
from attn_kernels_triton.scan.work import Given, between, spaced


class ByChunks(torch.autograd.Function):
    """Outputs and the last memory of `Given`; gradients to all of it."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the forward programs."""
        given = Given(*parts)  # type: ignore[arg-type]
        work = between(given)
        for launch in forward_launches(given, work):
            launch.run(given.key.device)
        ctx.save_for_backward(*parts)
        ctx.set_materialize_grads(False)
        return work.out, work.after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor | None, after: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute memories again and run the backward programs."""
        given = Given(*ctx.saved_tensors)
        change = torch.zeros_like(given.value) if out is None else out
        found = backward(given, change, after, between(given), decays=ctx.needs_input_grad[3])
        return (
            found.query,
            found.key,
            found.value,
            None if given.decay is None or found.decay is None else to_decay(given.decay, found.decay),
            None if given.strength is None or found.strength is None else found.strength.to(given.strength.dtype),
            None if given.before is None or found.before is None else found.before.to(given.before.dtype),
        )


def to_decay(decay: Tensor, found: Tensor) -> Tensor:
    """The gradient in the shape and type of the log decays, of that to each sequence and part of the channels."""
    if decay.shape[-1] == 1:
        found = found.sum(-1, keepdim=True)
    if decay.shape[0] != found.shape[0]:
        found = found.sum(0, keepdim=True)
    return found.to(decay.dtype)


def given_of(steps: Steps, before: Tensor | None) -> Given:
    """The tensors of a call, checked."""
    check_steps(steps, before)
    if steps.strength is not None:
        steps = steps._replace(strength=spaced(steps.strength[..., None]))
    return Given(*(None if part is None else addressable(part) for part in (*steps, before)))  # type: ignore[arg-type]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_chunks(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [batch, tokens, heads, value_size] in the type of the steps and the memory after them, float32.

    `before` is the memory at the start, None for an empty one. Raises `InvalidValue`, see `checks`.
    """
    given = given_of(steps, before)
    if not given.sizes.tokens:
        return steps.value, steps.nothing().float() if before is None else before.float()
    out, after = ByChunks.apply(*given)  # type: ignore[no-untyped-call]
    return out, after


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_token(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same as `by_chunks`, one token after the other and without gradients: for one or a few tokens."""
    given = given_of(steps, before)
    if not given.sizes.tokens:
        return steps.value, steps.nothing().float() if before is None else before.float()
    out, after = given.rows(given.sizes.value_size), given.memory()
    decode_launch(given, out, after).run(out.device)
    return out, after
