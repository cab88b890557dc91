"""FlashAttention's claims of full attention, of the program that computes it: exact, and memory as the length."""

from __future__ import annotations

import pytest
import torch
from attn_core import AttentionInputs, Causal, Full
from attn_kernels_triton.attention.attend import attend
from calls import Call
from torch.utils._python_dispatch import TorchDispatchMode


def by_matrices(query, key, value, causal):
    """softmax(Q Kᵀ / √d) V in float64, of rows [batch, length, heads, size]."""
    query, key, value = (rows.double().transpose(1, 2) for rows in (query, key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor) and made.device.type != "meta":
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return out


def computed(causal, length, attend):
    """Output and gradients, the most elements of one tensor, and the bytes that were kept for the gradient."""
    leaves = [rows.requires_grad_() for rows in torch.randn(3, 1, length, 2, 16)]
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend(*leaves)
        probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found = [out, *torch.autograd.grad((out * probe).sum(), leaves)]
    return found, leaves, seen.elements, sum(kept.values())


def by_program(causal):
    call = Call(Causal() if causal else Full(), heads=(2, 2))
    return lambda query, key, value: attend(call.spec, AttentionInputs(query=query, key=key, value=value))


@pytest.mark.parametrize("causal", [False, True])
def test_cl_13_the_program_gives_what_whole_matrices_give(causal):
    torch.manual_seed(0)
    found, leaves, _, _ = computed(causal, 130, by_program(causal))
    out = by_matrices(*leaves, causal)
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).view_as(out)
    expected = [out, *torch.autograd.grad((out * probe).sum(), leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_cl_27_memory_of_the_program_grows_as_the_length(causal):
    short, long = (computed(causal, length, by_program(causal))[2:] for length in (64, 256))
    assert long[0] <= 4 * short[0]
    assert long[1] <= 4 * short[1]
    matrices = [computed(causal, length, lambda *rows: by_matrices(*rows, causal))[2] for length in (64, 256)]
    assert matrices[1] == 16 * matrices[0]
