"""Launches as users would cause them, over tensors that are never touched."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Mask
from attn_core.distributions import Softmax
from attn_core.dropout import Dropout
from attn_core.kernels.attend import Varlen
from attn_kernels_triton.attention.backward import Backwards, backward_launches, bias_launch, call_of
from attn_kernels_triton.attention.forward import empty, forward_launch, inputs_of
from attn_kernels_triton.attention.plan import plan_of
from attn_kernels_triton.launch import Launch

LENGTH = 2048
CAUSAL = Causal()
NAMES = {
    "attend_delta": "delta",
    "pad": "delta",
    "gradient_to_queries": "to_queries",
    "gradient_to_dense_queries": "to_queries",
    "gradient_to_keys": "to_keys",
    "gradient_to_dense_keys": "to_keys",
}
"""What each backward program is for."""


def launches(
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    mask: Mask = CAUSAL,
    value_size: int = 0,
    heads: tuple[int, int] = (8, 2),
    varlen: Varlen | None = None,
    dropout: Dropout | None = None,
    length: int = LENGTH,
    **parts,
) -> dict[str, Launch]:
    """The programs of one attention by name; heads are of queries and of keys."""
    layout = Heads(query=heads[0], key_value=heads[1], key_size=size, value_size=value_size or size)
    spec = AttentionSpec(heads=layout, mask=mask, **{"distribution": Softmax(), **parts})

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.empty(1, length, count, width, dtype=dtype)

    operands = AttentionInputs(
        query=rows(heads[0], size),
        key=rows(heads[1], size),
        value=rows(heads[1], layout.value_size),
        parameters={name: torch.zeros(shape, requires_grad=True) for name, shape in spec.weights.items()},
        varlen=varlen,
        dropout=dropout,
    )
    plan, inputs = plan_of(spec, operands), inputs_of(operands)
    result = empty(plan, inputs)
    work = Backwards(inputs, result, result.out, result.lse, inputs)
    found = {"forward": forward_launch(plan, inputs, result)}
    found |= {NAMES[launch.program.__name__]: launch for launch in backward_launches(plan, work)}
    if plan.bias is not None:
        found["to_biases"], _ = bias_launch(plan, call_of(plan, work), plan.bias.shape[1] // 2)
    return found
