"""Layers as users build them: whether they use attn's kernels by default on this GPU, and give the right gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import bare
import torch
from torch import Tensor, nn

bare.make_known()

from attn_core import configure, installed  # noqa: E402 -- which finds what has just been made known
from attn_core.kernels.recurrence import RecurrenceDispatcher  # noqa: E402
from attn_kernels_triton.launch import Launch  # noqa: E402
from recurrences import judged  # noqa: E402


class Built(NamedTuple):
    """A mechanism with the element type of its layer, the function that switches it to the plain computation, and
    whether by default it uses attn's kernels, rather than torch's own on a GPU."""

    name: str
    dtype: torch.dtype
    plainly: Callable[[Any], None]
    ours: bool = True


def by_name(layer: Any) -> None:
    """Switch a softmax attention layer to the plain kernel, by name."""
    layer.use_kernel("plain")


def by_plan(layer: Any) -> None:
    """Switch a recurrent layer to the plain chunked computation, by its plan."""
    layer.plan = RecurrenceDispatcher(installed().kernels, "plain_chunked")


LAYERS = (
    *(Built(name, torch.bfloat16, by_name, ours=False) for name in ("mha", "gqa")),
    *(Built(name, torch.bfloat16, by_name) for name in ("sliding_window", "bigbird", "t5_bias", "mla")),
    *(Built(name, torch.float32, by_plan) for name in ("linear", "retnet", "gla", "deltanet", "kda")),
)


MAIN = {"attend_forward", "attend_dense", "attend_paired", "recall"}
"""The programs of which a layer that uses attn's kernels launches one."""


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each layer and result, the relative error against float64, and whether it and the chosen kernel are right."""
    width, heads, length = (32, 2, 20) if small else (256, 4, 300)
    for built in LAYERS:
        mechanism = installed().mechanisms.get(built.name)
        torch.manual_seed(0)
        dtype = built.dtype if device == "cuda" else torch.float32
        layer = mechanism.build(configure(mechanism, hidden_size=width, num_heads=heads)).to(device, dtype)
        rows = torch.randn(1, length, width, device=device).to(dtype)
        found, again = (results(layer, rows) for _ in range(2))
        taken = sorted(found.programs & MAIN)
        built.plainly(layer)
        usual, exact = results(layer, rows), results(layer.double(), rows.double())
        for name, truth in exact.tensors.items():
            three = found.tensors[name], usual.tensors[name], truth
            same = torch.equal(found.tensors[name], again.tensors[name])
            row = judged(f"layer {built.name}", name, three, same=same)
            ours = bool(taken) == (built.ours or device != "cuda") and not usual.programs & MAIN
            yield {**row, "programs": taken, "right": row["right"] and ours}


class Results(NamedTuple):
    """The resulting tensors by name, and the names of attn's programs that computed them."""

    tensors: dict[str, Tensor]
    programs: set[str]


def results(layer: nn.Module, rows: Tensor) -> Results:
    """The output, and the gradients of a fixed weighted sum of it to the input and to every weight."""
    programs: set[str] = set()
    run = Launch.run

    def counted(launch: Launch, device: torch.device) -> None:
        programs.add(launch.program.__name__)
        run(launch, device)

    Launch.run = counted  # type: ignore[method-assign]
    try:
        given = rows.detach().requires_grad_()
        out = layer(given)
        probe = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
        weights = dict(layer.named_parameters())
        found = torch.autograd.grad(out, [given, *weights.values()], probe, materialize_grads=True)
    finally:
        Launch.run = run  # type: ignore[method-assign]
    names = ("gradient to rows", *(f"gradient to {name}" for name in weights))
    return Results({"output": out.detach(), **dict(zip(names, found, strict=True))}, programs)
