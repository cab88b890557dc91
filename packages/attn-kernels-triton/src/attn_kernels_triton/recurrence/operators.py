"""Chunked recurrences as custom operators of PyTorch, with fake shapes and gradients, which torch.compile keeps in its
graphs.

Eager calls bypass these operators, whose overhead is larger than that of a kernel launch.
"""

from __future__ import annotations

from typing import Any

import torch
from attn_core.first_order import first_order_only
from attn_core.kernels.recurrence import Steps
from torch import Tensor

from attn_kernels_triton.recurrence.compute import given_of, to_decay
from attn_kernels_triton.recurrence.launch import Given, buffers_of, forward_launches, run_backward


def by_chunks(steps: Steps, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like `recurrence.compute.by_chunks`, as an operator."""
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
    """Outputs [batch, tokens, heads, value_size] in the dtype of the steps and the final state, float32."""
    steps = Steps(query, key, value, decay, strength)
    given = given_of(steps, before)
    if not given.sizes.tokens:
        empty = given.state().zero_() if before is None else before.float().clone()
        return torch.empty_like(value), empty

    work = buffers_of(given)
    for launch in forward_launches(given, work):
        launch.run(key.device)
    return work.out, work.after


def shapes_of(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors with the shapes and dtypes of the outputs and the final state."""
    batch, _, heads, size = key.shape
    out = torch.empty(value.shape, dtype=key.dtype, device=key.device)
    return out, torch.empty(batch, heads, size, value.shape[-1], dtype=torch.float32, device=key.device)


@torch.library.custom_op("attn_kernels_triton::recur_backward", mutates_args=())
def recur_backward(out: Tensor | None, after: Tensor | None, steps: list[Tensor], names: str) -> list[Tensor]:
    """The gradients of the requested tensors, in order, given those of the outputs and of the final state.

    `names` lists the fields of `Given` that `steps` are, separated by spaces, and after a slash those whose gradients
    are requested.
    """
    given, wanted = parse_call(steps, names)
    tensors = given_of(Steps(*given[:5]), given.before)
    if not tensors.sizes.tokens:
        return [torch.zeros_like(part) if name != "before" or after is None else after.to(part.dtype, copy=True)
                for name, part in wanted.items()]  # fmt: skip

    return backward_of(given, tensors, (out, after), wanted)


def backward_of(
    given: Given, tensors: Given, changes: tuple[Tensor | None, Tensor | None], wanted: dict[str, Tensor]
) -> list[Tensor]:
    """Run the backward kernels over `tensors`, which are those of `given` in a layout that kernels can address."""
    out, after = changes
    change = torch.zeros_like(tensors.value) if out is None else out
    found = run_backward(tensors, change, after, buffers_of(tensors), decays="decay" in wanted)
    gradients = {"query": found.query, "key": found.key, "value": found.value, "before": found.before}
    if given.decay is not None and found.decay is not None:
        gradients["decay"] = to_decay(given.decay, found.decay)
    if found.strength is not None:
        gradients["strength"] = found.strength.squeeze(-1)
    return [gradients[name].to(part.dtype).contiguous() for name, part in wanted.items()]  # type: ignore[union-attr]


def parse_call(steps: list[Tensor], names: str) -> tuple[Given, dict[str, Tensor]]:
    """The tensors of a call by name, and those whose gradients are requested, see `recur_backward`."""
    present, _, requested = names.partition("/")
    known = dict(zip(present.split(), steps, strict=True))
    given = Given(**{name: known.get(name) for name in Given._fields})  # type: ignore[arg-type]
    return given, {name: known[name] for name in requested.split()}


@recur.register_fake
def _(_query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return shapes_of(key, value)


@recur_backward.register_fake
def _(_out: Tensor | None, _after: Tensor | None, steps: list[Tensor], names: str) -> list[Tensor]:
    return [
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in parse_call(steps, names)[1].values()
    ]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001 -- as torch calls it
    """Save what the backward pass needs (`setup_context`)."""
    present = {name: part for name, part in zip(Given._fields, inputs, strict=True) if part is not None}
    ctx.names = " ".join(present)
    ctx.save_for_backward(*present.values())
    ctx.set_materialize_grads(False)


@first_order_only
def back(ctx: Any, out: Tensor | None, after: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the operator's arguments."""
    needed = [name for name, needs in zip(Given._fields, ctx.needs_input_grad, strict=False) if needs]
    if not needed or (out is None and after is None):
        return (None,) * len(Given._fields)
    names = f"{ctx.names}/{' '.join(needed)}"
    found = dict(zip(needed, recur_backward(out, after, list(ctx.saved_tensors), names), strict=True))
    return tuple(found.get(name) for name in Given._fields)


recur.register_autograd(back, setup_context=save_for_backward)
