"""Layers with adapters, those of one input together, give the numbers and gradients of their definition in float64."""

from __future__ import annotations

import pytest
import torch
from attn_core.kernels.product import ProductKernel
from attn_models.lora.together import AdaptedLinear, adapted
from torch.utils.flop_counter import FlopCounterMode


def with_gradients(compute, operands):
    """Outputs of layers, and the gradients of their operands for a sum of squares."""
    leaves = [part.detach().clone().requires_grad_() for part in operands]
    outs = compute(*leaves)
    total = sum(out.square().sum() for out in outs)
    return [out.detach() for out in outs] + list(torch.autograd.grad(total, leaves))


class Products(ProductKernel):
    """A kernel that multiplies as PyTorch does."""

    name, summary = "products", "for tests"

    def cost(self, _problem):
        return 0.5

    def linear(self, rows, weight, bias):
        raise NotImplementedError

    def product(self, left, right, to=None):
        return left @ right if to is None else to.add_(left @ right)


def layers_of(widths, *, biased=True):
    """Layers of 24 inputs with adapters of different ranks."""
    made = []
    for rank, outputs in enumerate(widths, start=1):
        bias = torch.randn(outputs) if biased else None
        made.append(
            AdaptedLinear(torch.randn(outputs, 24), bias, torch.randn(rank, 24), torch.randn(outputs, rank), 0.3)
        )
    return made


@pytest.mark.parametrize("widths", [(5,), (40, 17, 3)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kernel", [None, Products()])
def test_adapted_layers_of_one_input_and_their_gradients(widths, biased, kernel, monkeypatch):
    torch.manual_seed(4)
    monkeypatch.setattr("attn_models.lora.together.product_kernel", lambda *_: kernel)
    layers = layers_of(widths, biased=biased)

    def both(compute):
        def of(rows, *parts):
            pairs = zip(layers, parts[::2], parts[1::2], strict=True)
            return compute(rows, [layer._replace(a=a, b=b) for layer, a, b in pairs])

        return of

    def defined(rows, layers):
        def one(layer):
            bias = 0 if layer.bias is None else layer.bias
            return rows @ layer.weight.T.to(rows.dtype) + bias + layer.scaling * (rows @ layer.a.T) @ layer.b.T

        return [one(layer) for layer in layers]

    trained = [part for layer in layers for part in (layer.a, layer.b)]
    for rows in (torch.randn(2, 9, 24), torch.randn(30, 24)):
        found = with_gradients(both(adapted), [rows, *trained])
        wanted = with_gradients(both(defined), [part.double() for part in (rows, *trained)])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_an_output_without_use_and_rows_without_gradient_are_left_out():
    torch.manual_seed(6)
    layers = [layer._replace(a=layer.a.requires_grad_(), b=layer.b.requires_grad_()) for layer in layers_of((5, 6))]
    rows = torch.randn(8, 24)
    adapted(rows, layers)[1].sum().backward()
    assert layers[0].b.grad is None
    torch.testing.assert_close(layers[1].b.grad, 0.3 * (rows @ layers[1].a.T).sum(0).expand(6, 2).detach())
    assert adapted(rows, [layers[0]._replace(weight=layers[0].weight.requires_grad_())]) is None


def test_a_flop_counter_sees_every_product(monkeypatch):
    """Two FLOPs per multiply-add: each of the three products of a layer once forward, and but for the frozen weight's
    gradient twice backward."""
    monkeypatch.setattr("attn_models.lora.together.product_kernel", lambda *_: pytest.fail("no counter sees a kernel"))
    layers = [layer._replace(a=layer.a.requires_grad_(), b=layer.b.requires_grad_()) for layer in layers_of((40, 17))]
    with FlopCounterMode(display=False) as counter:
        sum(out.sum() for out in adapted(torch.randn(9, 24, requires_grad=True), layers)).backward()
    multiplied = sum(2 * 24 * outputs + 3 * rank * (24 + outputs) for rank, outputs in ((1, 40), (2, 17)))
    assert counter.get_total_flops() == 2 * 9 * multiplied
