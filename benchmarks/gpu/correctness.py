"""Correctness of kernels: errors of outputs and gradients against float64, limited by the plain computation's error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.kernels.attend import texts
from attn_kernels_triton.attention.attend import attend
from attn_variants.kernels.attend import Plain
from cases import Case
from torch import Tensor

FACTOR, ROUNDINGS = 1.25, 3


def verdicts(cases: list[Case], device: str) -> Iterator[dict[str, Any]]:
    """For each case and result, the relative error, the allowed error, and whether the result is right."""
    for case in cases:
        operands = case.operands(device)
        exact = results(plain, case.spec, changed(operands, {n: t.double() for n, t in leaves(operands).items()}))
        usual, found = results(plain, case.spec, operands), results(attend, case.spec, operands)
        again = results(attend, case.spec, operands)
        for name, truth in exact.items():
            size = float(torch.linalg.vector_norm(truth)) or 1.0
            error, own = (float(torch.linalg.vector_norm(r[name].double() - truth)) / size for r in (found, usual))
            allowed = FACTOR * own + ROUNDINGS * torch.finfo(found[name].dtype).eps
            same = torch.equal(found[name], again[name])
            right = error <= allowed and same
            yield {"case": case.name, "what": name, "error": error, "allowed": allowed, "same": same, "right": right}


def plain(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The plain (reference) computation; packed texts are computed one by one."""
    # Constructed directly, not found by name: on a bare machine no package of this tree is installed.
    run = Plain().run
    if operands.varlen is None:
        return run(spec, operands)
    return torch.cat([run(spec, text) for text in texts(operands)], dim=1)


def leaves(operands: AttentionInputs) -> dict[str, Tensor]:
    """The tensors that gradients are computed for, by name."""
    return {"query": operands.query, "key": operands.key, "value": operands.value, **operands.parameters}


def changed(operands: AttentionInputs, tensors: dict[str, Tensor]) -> AttentionInputs:
    """A copy of the operands with these tensors in place of `leaves`."""
    own: dict[str, Any] = {name: tensors[name] for name in ("query", "key", "value")}
    return dataclasses.replace(operands, **own, parameters={name: tensors[name] for name in operands.parameters})


def results(
    run: Callable[[AttentionSpec, AttentionInputs], Tensor], spec: AttentionSpec, operands: AttentionInputs
) -> dict[str, Tensor]:
    """The output, and the gradients of a fixed weighted sum of it to all of `leaves`."""
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves(operands).items()}
    out = run(spec, changed(operands, tensors))
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view_as(out).to(out.dtype)
    found = torch.autograd.grad(out, list(tensors.values()), probe, materialize_grads=True)
    return {"output": out.detach(), **dict(zip((f"gradient to {n}" for n in tensors), found, strict=True))}
