"""Recurrences over chunks as operators of torch, which torch.compile keeps whole in its graphs: with shapes and
gradients registered.

Uncompiled calls go without these operators, whose bookkeeping takes longer than starting a program.
"""

from __future__ import annotations

from typing import Any

import torch
from attn_core.kernels.recurrence import Steps
from torch import Tensor

from attn_kernels_triton.recurrence.compute import given_of, to_decay
from attn_kernels_triton.recurrence.launch import Given, between, forward_launches, run_backward


def by_chunks(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and the memory after them, as of `recurrence.compute.by_chunks`."""
    found: tuple[Tensor, Tensor] = recur(*steps, before)
    return found


@torch.library.custom_op("attn_kernels_triton::recur", mutates_args=())
def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [batch, tokens, heads, value_size] as the steps and the memory after them, float32."""
    given = given_of(Steps(query, key, value, decay, strength), before)
    if not given.sizes.tokens:
        empty = given.memory().zero_() if before is None else before.float().clone()
        return torch.empty_like(value), empty
    work = between(given)
    for launch in forward_launches(given, work):
        launch.run(key.device)
    return work.out, work.after


@torch.library.custom_op("attn_kernels_triton::recur_backward", mutates_args=())
def recur_backward(out: Tensor | None, after: Tensor | None, steps: list[Tensor], names: str) -> list[Tensor]:
    """Gradients to what `names` names, in this order, of those to the outputs and to the memory after them.

    `names` says what `steps` are, words of `Steps` and `before` with spaces between them, and after a slash for which
    of them gradients are wanted.
    """
    given, wanted = understood(steps, names)
    tensors = given_of(Steps(*given[:5]), given.before)
    if not tensors.sizes.tokens:
        return [torch.zeros_like(part) if name != "before" or after is None else after.to(part.dtype, copy=True)
                for name, part in wanted.items()]  # fmt: skip
    change = torch.zeros_like(tensors.value) if out is None else out
    found = run_backward(tensors, change, after, between(tensors), decays="decay" in wanted)
    gradients = {"query": found.query, "key": found.key, "value": found.value, "before": found.before}
    if given.decay is not None and found.decay is not None:
        gradients["decay"] = to_decay(given.decay, found.decay)
    if found.strength is not None:
        gradients["strength"] = found.strength.squeeze(-1)
    return [gradients[name].to(part.dtype).contiguous() for name, part in wanted.items()]  # type: ignore[union-attr]


def understood(steps: list[Tensor], names: str) -> tuple[Given, dict[str, Tensor]]:
    """The tensors of a call by their names, and those to which gradients are wanted."""
    said, _, asked = names.partition("/")
    known = dict(zip(said.split(), steps, strict=True))
    given = Given(**{name: known.get(name) for name in Given._fields})  # type: ignore[arg-type]
    return given, {name: known[name] for name in asked.split()}


@recur.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, _, heads, size = key.shape
    out = torch.empty(value.shape, dtype=key.dtype, device=query.device)
    return out, torch.empty(batch, heads, size, value.shape[-1], dtype=torch.float32, device=query.device)


@recur_backward.register_fake
def _(_out: Tensor | None, _after: Tensor | None, steps: list[Tensor], names: str) -> list[Tensor]:
    return [
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in understood(steps, names)[1].values()
    ]


def remember(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001 -- as torch calls it
    """What the gradient needs."""
    present = {name: part for name, part in zip(Given._fields, inputs, strict=True) if part is not None}
    ctx.names = " ".join(present)
    ctx.save_for_backward(*present.values())
    ctx.set_materialize_grads(False)


def back(ctx: Any, out: Tensor | None, after: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients to what the operator was given."""
    needed = [name for name, needs in zip(Given._fields, ctx.needs_input_grad, strict=True) if needs]
    if not needed or (out is None and after is None):
        return (None,) * len(Given._fields)
    asked = f"{ctx.names}/{' '.join(needed)}"
    found = dict(zip(needed, recur_backward(out, after, list(ctx.saved_tensors), asked), strict=True))
    return tuple(found.get(name) for name in Given._fields)


recur.register_autograd(back, setup_context=remember)
