"""CL-33: cutting an image into patches by a convolution is cutting it out and multiplying."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


def by_product(convolution: nn.Conv2d, images: Tensor) -> Tensor:
    """Patches laid flat, [batch, patch, channel · row · column], times the convolution's weights as one matrix."""
    size = convolution.kernel_size[0]
    batch, channels, height, width = images.shape
    cut = images.view(batch, channels, height // size, size, width // size, size)
    flat = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size * size)
    bias = convolution.bias
    assert bias is not None
    return flat @ convolution.weight.flatten(1).T + bias


@pytest.mark.parametrize(("channels", "size", "grid"), [(3, 4, (2, 3)), (1, 1, (5, 5)), (3, 16, (1, 1))])
def test_cl_33_a_convolution_over_patches_is_a_product_with_each(
    channels: int, size: int, grid: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, 24, kernel_size=size, stride=size, dtype=torch.float64)
    images = torch.randn(2, channels, grid[0] * size, grid[1] * size, dtype=torch.float64, requires_grad=True)
    rows, expected = convolution(images).flatten(2).transpose(1, 2), by_product(convolution, images)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)
    wanted = (images, convolution.weight, convolution.bias)
    probe = torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype).view_as(rows)
    for found, told in zip(
        torch.autograd.grad((rows * probe).sum(), wanted),
        torch.autograd.grad((expected * probe).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(found, told, rtol=0, atol=1e-12)


def test_cl_33_the_product_of_other_patches_is_not_the_convolution() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 5, kernel_size=2, stride=2, dtype=torch.float64)
    images = torch.randn(1, 1, 4, 6, dtype=torch.float64)
    rows = convolution(images).flatten(2).transpose(1, 2)
    assert not torch.allclose(rows, by_product(convolution, images.flip(-1)))
