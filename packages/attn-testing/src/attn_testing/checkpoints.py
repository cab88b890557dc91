"""What a model that was written to a file and read again owes: its tensors bit for bit, its results to rounding.

Memory that torch allocates itself begins at a multiple of 64 bytes, so the same computation on tensors of the same
shapes gives the same bits on every machine, and tests of it may ask for them. Tensors of a safetensors file lie where
the file has them, at a multiple of 8 bytes at best; libraries of matrix products (MKL, oneDNN, OpenBLAS) then choose
other loops, which add in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attn_testing.law import require


def require_same_parameters(found: nn.Module, expected: nn.Module) -> None:
    """Raise `LawBroken` unless both state dicts have the same names, types, shapes and bits."""
    ours, theirs = found.state_dict(), expected.state_dict()
    require(ours.keys() == theirs.keys(), f"tensors of one alone: {sorted(ours.keys() ^ theirs.keys())}")
    for name, tensor in theirs.items():
        same = ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor)
        require(same, f"tensor {name!r} is another than before")


def require_same_model(
    found: nn.Module, expected: nn.Module, *inputs: Any, call: Callable[..., Tensor] | None = None
) -> None:
    """Raise `LawBroken` unless `found`, read from a folder to which `expected` was written, is the same model.

    Parameters and buffers are compared bit for bit, what both give for `inputs` to the rounding of its type. `call`
    takes a model and the inputs, and returns what is compared: by default the result of the model's `forward`.
    """
    require_same_parameters(found, expected)
    run = call or (lambda model, *given: model(*given))
    torch.testing.assert_close(run(found, *inputs), run(expected, *inputs))
