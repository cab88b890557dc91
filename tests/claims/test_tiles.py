"""CL-13, CL-15, CL-27: full attention in tiles is exact, keeps no matrix of all pairs, and learns the same.

Full means every pair, or every pair of a token and an earlier one. The Triton kernel is held to the same in
`packages/attn-kernels-triton/tests/interpreted/test_attend.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Mask
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_variants.attention.layer import SpecLayer
from attn_variants.compute import plain
from attn_variants.compute.block_sparse.attend import attend as attend_in_tiles
from attn_variants.compute.torch_sdpa import attend as attend_fused
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, SIZE = 2, 8
Attend = Callable[[AttentionSpec, AttentionInputs], Tensor]


def spec_of(mask: Mask) -> AttentionSpec:
    """Softmax attention of `HEADS` heads."""
    return AttentionSpec(heads=Heads(query=HEADS, key_value=HEADS, key_size=SIZE, value_size=SIZE), mask=mask)


def by_matrices(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """softmax(Q Kᵀ / √d) V of rows [batch, length, heads, size]."""
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    scores = query @ key.mT / SIZE**0.5
    if causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


def with_gradients(function: Callable[..., Tensor], given: Tensor) -> list[Tensor]:
    """The output of three tensors, and the gradients to them of a fixed weighted sum of it."""
    leaves = [rows.clone().requires_grad_() for rows in given]
    out = function(*leaves)
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * probe).sum(), leaves)]


@pytest.mark.parametrize("attend", [attend_fused, attend_in_tiles], ids=["fused", "tiles"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 197])
def test_cl_13_full_attention_in_tiles_is_that_of_whole_matrices(attend: Attend, causal: bool, length: int) -> None:
    torch.manual_seed(0)
    given, spec = torch.randn(3, 2, length, HEADS, SIZE, dtype=torch.float64), spec_of(Causal() if causal else Full())
    found = with_gradients(lambda q, k, v: attend(spec, AttentionInputs(query=q, key=k, value=v)), given)
    expected = with_gradients(lambda q, k, v: by_matrices(q, k, v, causal), given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements that any tensor has which an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, Tensor) and made.untyped_storage().nbytes():
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return out


def measured(attend: Attend, mask: Mask, length: int) -> tuple[int, int]:
    """The most elements of one tensor in forward and backward, and the bytes kept for the gradient."""
    spec, kept = spec_of(mask), {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaves = [rows.requires_grad_() for rows in torch.randn(3, 1, length, HEADS, SIZE)]
    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend(spec, AttentionInputs(query=leaves[0], key=leaves[1], value=leaves[2]))
        out.sum().backward()
    return seen.elements, sum(kept.values())


def growth(attend: Attend, mask: Mask) -> tuple[float, float]:
    """How many times as large both are at four times the length."""
    short, long = measured(attend, mask, 512), measured(attend, mask, 2048)
    return long[0] / short[0], long[1] / short[1]


CASES = {
    "fused": (attend_fused, Full()),
    "fused, causal": (attend_fused, Causal()),
    "tiles, causal": (attend_in_tiles, Causal()),
}


@pytest.mark.parametrize("case", CASES)
def test_cl_27_memory_of_full_attention_in_tiles_grows_as_the_length(case: str) -> None:
    largest, kept = growth(*CASES[case])
    assert largest <= 4
    assert kept <= 4


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_cl_27_memory_of_the_equation_grows_as_its_square(mask: Mask) -> None:
    largest, kept = growth(plain.attend, mask)
    assert largest == 16
    assert kept > 12


def test_cl_27_tiles_of_torch_without_a_mask_are_as_wide_as_the_sequence() -> None:
    """The kernel that skips pairs has none to skip there: it is never chosen for that, and says so by its cost."""
    largest, kept = growth(attend_in_tiles, Full())
    assert largest == 16
    assert kept <= 4


def losses(kernel: str, mechanism: str, **options: int) -> list[float]:
    """Losses of a small GPT that learns a repeating text, its attention computed by one kernel, in float64."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=7,
        max_seq_len=160,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        mechanism=mechanism,
        options=options,
    )
    model = Decoder(config).double()
    for layer in model.modules():
        if isinstance(layer, SpecLayer):
            layer.use_kernel(kernel)
    tokens = (torch.arange(2 * 160).view(2, 160) ** 2) % 7
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        steps.zero_grad()
        loss.backward()
        steps.step()
        curve.append(loss.item())
    return curve


def test_cl_15_a_model_learns_in_tiles_what_it_learns_by_the_equation() -> None:
    """Full causal attention; the kernel of tiles takes it as a window as long as the sequence."""
    by_equation = losses("plain", "mha")
    assert losses("torch_sdpa", "mha") == pytest.approx(by_equation, rel=0, abs=1e-9)
    assert losses("block_sparse", "sliding_window", window=160) == pytest.approx(by_equation, rel=0, abs=1e-9)
    assert by_equation[-1] < 0.9 * by_equation[0]
