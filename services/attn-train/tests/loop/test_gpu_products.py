"""Linear layers in bfloat16 on a pretended GPU: what is cast, when, and that gradients are no worse than autocast's."""

from __future__ import annotations

import pytest
import torch
from attn_train.gpu_products import GpuProducts, HalfWeights
from attn_train.precision import forward_precision
from pretend_cuda import DEVICE, PretendCudaTensor, pretended_gpu, unwrapped
from torch import nn
from torch.nn import functional


@pytest.fixture
def gpu():
    with pretended_gpu() as counter:
        yield counter


def on_gpu(*shapes, seed=2):
    """Leaves of these shapes on the pretended GPU, float32."""
    generator = torch.Generator().manual_seed(seed)
    return [PretendCudaTensor(torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


def gradients(precision, leaves, change):
    """Gradients to rows, weight and bias of their product, which three layers read, on the CPU."""
    rows, weight, bias = leaves
    with precision:
        out = sum(functional.linear(rows, weight, bias) for _ in range(3))
    assert out.dtype == torch.bfloat16
    return [unwrapped(found) for found in torch.autograd.grad(out, leaves, change)]


def test_gradients_are_at_least_as_near_to_those_of_float64_as_autocasts(gpu):
    leaves = on_gpu((3, 70, 24), (40, 24), (40,))
    change = on_gpu((3, 70, 40), seed=3)[0].detach().to(torch.bfloat16)
    exact = [unwrapped(leaf.detach()).to(torch.bfloat16).double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(3 * functional.linear(*exact), exact, unwrapped(change).double())
    found = gradients(forward_precision("bfloat16", DEVICE), leaves, change)
    usual = gradients(torch.autocast("cuda", dtype=torch.bfloat16), leaves, change)
    for ours, torchs, exactly in zip(found, usual, truth, strict=True):
        assert ours.dtype == torch.float32
        errors = [float((some.double() - exactly).norm() / exactly.norm()) for some in (ours, torchs)]
        assert errors[0] <= errors[1], errors
        assert errors[0] < 1e-6, "summed in float32"


def test_products_are_autocasts_bit_for_bit(gpu):
    rows, weight, bias = on_gpu((2, 5, 24), (40, 24), (40,))
    for part in (rows, rows.detach().to(torch.bfloat16)):
        for own in (None, bias):
            with forward_precision("bfloat16", DEVICE):
                found = functional.linear(part, weight, own)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                assert torch.equal(unwrapped(found), unwrapped(functional.linear(part, weight, own)))


def test_rows_are_cast_once_for_layers_that_follow_each_other_and_again_once_they_change(gpu):
    rows, weight = on_gpu((6, 24), (40, 24))
    rows, weight = rows.detach(), weight.detach().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16), GpuProducts():
        before = functional.linear(rows, weight)
        gpu.reset()
        functional.linear(rows, weight)
        assert gpu.launches["_to_copy"] == 1, "the weight, which nothing was told of"
        rows.mul_(2)
        after = functional.linear(rows, weight)
    assert torch.equal(unwrapped(after), 2 * unwrapped(before))


def test_rows_of_inference_mode_are_cast_each_time(gpu):
    _, weight = on_gpu((6, 24), (40, 24))
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16), GpuProducts():
        rows = on_gpu((6, 24))[0].detach()
        before = functional.linear(rows, weight)
        rows.mul_(2)
        assert torch.equal(unwrapped(functional.linear(rows, weight)), 2 * unwrapped(before))


def test_weights_are_those_of_the_last_refresh_and_others_are_cast_when_they_are_read(gpu):
    linear, other = nn.Linear(8, 8), nn.Linear(8, 8)
    halves = HalfWeights(nn.Sequential(linear, linear, nn.Embedding(3, 8)))
    for _ in range(2):
        with torch.no_grad():
            linear.weight.add_(1)
            other.weight.add_(1)
        halves.refresh()
        for module in (linear, other):
            for part in (module.weight, module.bias):
                assert torch.equal(halves.of(part), part.to(torch.bfloat16))
    assert halves.of(linear.weight) is halves.of(linear.weight)


def test_where_autocast_is_off_or_weights_are_not_float32_products_are_torchs(gpu):
    rows, weight = on_gpu((6, 24), (40, 24))
    with forward_precision("bfloat16", DEVICE):
        with torch.autocast("cuda", enabled=False):
            assert functional.linear(rows, weight).dtype == torch.float32
        double = functional.linear(rows.detach().double(), weight.detach().double())
    assert double.dtype == torch.float64
    with GpuProducts():
        assert functional.linear(rows, weight).dtype == torch.float32
