"""Checks of a model that was saved and loaded again: the same tensors bit for bit, the same results up to rounding.

Memory that torch allocates is aligned to 64 bytes, so a computation on tensors of the same shapes gives the same bits
each time, and tests may require that. Tensors of a memory-mapped safetensors file are aligned to 8 bytes at best, for
which matrix libraries (MKL, oneDNN, OpenBLAS) choose other loops, which add in another order.
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
    require(ours.keys() == theirs.keys(), f"tensors in only one of the models: {sorted(ours.keys() ^ theirs.keys())}")
    for name, tensor in theirs.items():
        same = ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor)
        require(same, f"tensor {name!r} differs from the saved one")


def require_same_model(
    found: nn.Module, expected: nn.Module, *inputs: Any, call: Callable[..., Tensor] | None = None
) -> None:
    """Raise `LawBroken` unless `found`, read from a folder to which `expected` was written, is the same model.

    Parameters and buffers are compared bit for bit, the results for `inputs` within the rounding of their dtype. `call`
    takes a model and the inputs, and returns the tensor to compare: by default the result of the model's `forward`.
    """
    require_same_parameters(found, expected)
    run = call or (lambda model, *given: model(*given))
    torch.testing.assert_close(run(found, *inputs), run(expected, *inputs))
