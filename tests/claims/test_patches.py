"""CL-33: cutting an image into patches by a convolution is cutting it out and multiplying."""

from __future__ import annotations

import pytest
import torch
from attn_models.encoder.config import VisionConfig
from attn_models.encoder.encoder import VisionTransformer
from torch import Tensor


def model_of(channels: int, patch: int, side: int) -> VisionTransformer:
    """A vision Transformer of ours; its first block is handed what its paper calls z_0."""
    torch.manual_seed(0)
    config = VisionConfig(
        image=side,
        patch=patch,
        channels=channels,
        classes=3,
        hidden_size=24,
        num_layers=1,
        num_heads=2,
        intermediate_size=8,
    )
    return VisionTransformer(config).double()


def entering(model: VisionTransformer, images: Tensor) -> Tensor:
    """What enters the first block, [batch, 1 + patches, width]."""
    seen: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images)
    handle.remove()
    return seen[0]


def by_product(model: VisionTransformer, images: Tensor) -> Tensor:
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos (Dosovitskiy et al. 2021, equation 1), patch by patch, row by row."""
    size, side = model.config.patch, model.config.image
    matrix, bias = model.patches.weight.flatten(1), model.patches.bias
    assert bias is not None
    words = [model.begin.expand(len(images), -1, -1)[:, 0]]
    for top in range(0, side, size):
        for left in range(0, side, size):
            patch = images[:, :, top : top + size, left : left + size].flatten(1)
            words.append(patch @ matrix.T + bias)
    return torch.stack(words, dim=1) + model.positions


@pytest.mark.parametrize(("channels", "size", "side"), [(3, 4, 12), (1, 1, 5), (3, 16, 16)])
def test_cl_33_a_convolution_over_patches_is_a_product_with_each(channels: int, size: int, side: int) -> None:
    model = model_of(channels, size, side)
    images = torch.randn(2, channels, side, side, dtype=torch.float64, requires_grad=True)
    rows, expected = entering(model, images), by_product(model, images)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)
    wanted = (images, model.patches.weight, model.patches.bias, model.positions)
    probe = torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype).view_as(rows)
    for found, told in zip(
        torch.autograd.grad((rows * probe).sum(), wanted),
        torch.autograd.grad((expected * probe).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(found, told, rtol=0, atol=1e-12)


def test_cl_33_the_product_of_other_patches_is_not_the_convolution() -> None:
    model = model_of(1, 2, 6)
    images = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    assert not torch.allclose(entering(model, images), by_product(model, images.flip(-1)))
    assert not torch.allclose(entering(model, images), by_product(model, images.transpose(-1, -2)))
