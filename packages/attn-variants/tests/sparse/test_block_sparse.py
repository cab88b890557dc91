"""The kernel that skips what nobody sees: exact, linear in the length, and chosen where that pays."""

import dataclasses

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, Window, installed
from attn_core.kernels.attend import attend_problem
from attn_core.kernels.dispatch import choose
from attn_core.masks import (
    BigBird,
    Chunked,
    Fixed,
    GlobalTokens,
    Neighbourhood,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Strided,
)
from attn_core.masks.layout import seen_by, tiled
from attn_variants.attention.kernels import AttentionKernels
from attn_variants.compute import plain
from attn_variants.compute.block_sparse.attend import attend
from attn_variants.compute.block_sparse.layout import parts
from torch.utils._python_dispatch import TorchDispatchMode

MASKS = [
    Window(left=70),
    Window(left=30, right=100),
    Window(left=9, right=9, dilation=7),
    Window(left=20, right=20) | GlobalTokens((0, 1, 130)),
    Window(left=50) | (Prefix(4) & Causal()),
    Strided(12),
    Strided(12).column,
    Fixed(block=32, summaries=3),
    Neighbourhood(size=41),
    Neighbourhood(size=11, dilation=5),
    Chunked(size=50) & Causal(),
    Segments((17, 0, 90, 1, 60)) & Causal(),
    PerHead(tuple(Window(left=10 + head // 2, dilation=1 + head // 2) for head in range(4))),
    BigBird(block=8, random=2, number_of_heads=4),
    ~Window(left=190),
]


def heads(query=4, key_value=4, size=8):
    return Heads(query=query, key_value=key_value, key_size=size, value_size=size)


def draw(layout, queries, keys, batch=2):
    return AttentionInputs(
        query=torch.randn(batch, queries, layout.query, layout.key_size, dtype=torch.float64),
        key=torch.randn(batch, keys, layout.key_value, layout.key_size, dtype=torch.float64),
        value=torch.randn(batch, keys, layout.key_value, layout.value_size, dtype=torch.float64),
    )


def results(function, spec, operands):
    leaves = [rows.clone().requires_grad_() for rows in (operands.query, operands.key, operands.value)]
    out = function(spec, dataclasses.replace(operands, query=leaves[0], key=leaves[1], value=leaves[2]))
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * probe).sum(), leaves)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(197, 197), (90, 210)], ids=str)
def test_outputs_and_gradients_over_many_tiles_equal_those_of_the_equation(mask, queries, keys):
    layout = heads(4, 2)
    spec = AttentionSpec(heads=layout, mask=mask)
    operands = draw(layout, queries, keys)
    for found, expected in zip(results(attend, spec, operands), results(plain.attend, spec, operands), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "mask", [Window(left=70), Strided(12), Neighbourhood(size=41), BigBird(block=4, number_of_heads=4)], ids=str
)
def test_padded_sequences_of_several_lengths_equal_those_of_the_equation(mask):
    spec = AttentionSpec(heads=heads(), mask=mask)
    key_padding_mask = torch.arange(150) < torch.tensor([[150], [83], [0], [150]])
    key_padding_mask[3, 20:40] = False
    operands = dataclasses.replace(draw(spec.heads, 150, 150, batch=4), key_padding_mask=key_padding_mask)
    for found, expected in zip(results(attend, spec, operands), results(plain.attend, spec, operands), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_hold_every_query_once_and_every_allowed_pair(mask):
    bound = mask.over(197).of_head(1)
    rows = sorted(row for tile in tiled(bound, 197, 64) for row in tile)
    assert rows == list(range(197))
    pairs = sum(
        int(b.allowed.sum()) * (len(b.queries) // len(b.allowed))
        if b.allowed is not None
        else b.queries.shape[1] * b.keys.numel()
        for part in parts(bound, 197, 197)
        for b in part
    )
    assert pairs == bound.count(197, 197)


def test_parts_of_a_mask_share_no_pair_and_have_all():
    mask = Strided(6) & Segments((40, 57))
    here = torch.arange(97)
    seen = [part.allows(here[:, None], here).int() for part in mask.split]
    assert torch.equal(sum(seen), mask.allows(here[:, None], here).int())
    assert all(int(part.sum()) == part_mask.count(97, 97) for part, part_mask in zip(seen, mask.split, strict=True))


def test_parts_in_few_bits_are_put_together_in_many():
    spec = AttentionSpec(heads=heads(), mask=Strided(9))
    operands = draw(spec.heads, 150, 150)
    few = [rows.bfloat16() for rows in (operands.query, operands.key, operands.value)]
    out = attend(spec, AttentionInputs(query=few[0], key=few[1], value=few[2]))
    exact = plain.attend(spec, AttentionInputs(query=few[0].double(), key=few[1].double(), value=few[2].double()))
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), exact, rtol=0.01, atol=0.02)


class Largest(TorchDispatchMode):
    """The most elements that any tensor has which an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().nbytes():
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return out


def largest(mask, length):
    spec = AttentionSpec(heads=heads(), mask=mask)
    operands = draw(spec.heads, length, length, batch=1)
    parts.cache_clear()
    with Largest() as seen:
        results(attend, spec, operands)
    return seen.elements


@pytest.mark.parametrize("mask", [MASKS[0], MASKS[2], MASKS[4], MASKS[8], MASKS[10]], ids=str)
def test_no_tensor_grows_faster_than_the_length(mask):
    assert all(largest(mask, length) <= 140 * length for length in (512, 1024, 2048))


def kept(mask, length):
    """Bytes that are remembered for the gradient."""
    spec, held = AttentionSpec(heads=heads(), mask=mask), {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaves = [rows.requires_grad_() for rows in torch.randn(3, 1, length, 4, 8)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(spec, AttentionInputs(query=leaves[0], key=leaves[1], value=leaves[2]))
    assert out.requires_grad
    return sum(held.values())


def test_what_is_remembered_for_the_gradient_is_inputs_outputs_and_one_number_a_query():
    assert kept(Window(left=100, right=100), 512) == 512 * 4 * (4 * 8 + 1) * 4


def problem(mask, length, **more):
    spec = AttentionSpec(heads=heads(8, 8, 64), mask=mask)
    call = {"dtype": "float32", "device": "cpu", "gradients": True, "padded": False, **more}
    return attend_problem(spec, **call, queries=length, keys=length)


@pytest.mark.parametrize(
    "mask", [Window(left=255), Window(left=255, right=255) | GlobalTokens((0,)), Chunked(size=512), Strided(64)]
)
def test_it_is_chosen_where_little_is_left_and_not_where_all_is_or_calls_are_short(mask):
    kernels = installed().kernels
    assert choose(kernels, problem(mask, 4096)).name == "block_sparse"
    assert choose(kernels, problem(mask, 128)).name == "torch_sdpa"
    assert choose(kernels, problem(mask | Predicate(lambda q, k: q == k), 4096)).name == "torch_sdpa"
    assert choose(kernels, problem(Window(left=4000), 4096)).name == "torch_sdpa"
    has_positions = problem(mask, 4096, padded=True, has_positions=True, kv_unordered=True)
    assert choose(kernels, has_positions).name == "torch_sdpa"


def test_a_layer_chooses_by_the_length_of_its_call():
    spec = AttentionSpec(heads=heads(1, 1), mask=Window(left=16))
    plan, names = AttentionKernels(spec), []
    run = {kernel.name: index for index, kernel in enumerate(plan._operation.kernels)}
    for length in (64, 2000):
        rows = torch.randn(1, length, 1, 8)
        plan.run(AttentionInputs(query=rows, key=rows, value=rows))
        names.append(list(plan._operation._chosen.values())[-1])
    assert names == [run["torch_sdpa"], run["block_sparse"]]


def test_neighbours_of_a_dilated_window_stand_a_dilation_apart():
    window = Window(left=4, dilation=8)
    (tile, *_) = tiled(window, 128, 64)
    assert tile == range(0, 128, 8)
    assert seen_by(window, tile, 128, 128) == [(key, key + 1) for key in range(0, 128, 8)]
