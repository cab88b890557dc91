"""Linear layers may multiply in bfloat16, or by a kernel of this machine, while a model is trained; nothing else."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from attn_core.kernels.base import Anything, OneOf
from attn_core.kernels.dispatch import Operation
from attn_core.kernels.product import ProductKernel, ProductProblem
from attn_models.decoder.decoder import Decoder
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter
from attn_schema.decoder import DecoderConfig
from attn_schema.training import OptimizerConfig
from attn_train.optimizer import adamw
from attn_train.precision import Bfloat16Products, Float32Products
from attn_train.records import StopFlag
from attn_train.trainer import Trainer
from attn_train.weight_average import WeightAverage
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode


def rounded(values):
    """What bfloat16 keeps of them."""
    return values.to(torch.bfloat16).to(torch.float64)


@pytest.fixture
def operands():
    """Rows, a weight, a bias and the gradient of their product, as float32."""
    torch.manual_seed(2)
    shapes = (3, 7, 24), (40, 24), (40,), (3, 7, 40)
    return [torch.randn(shape).requires_grad_(place < 3) for place, shape in enumerate(shapes)]


def test_products_are_those_of_rounded_operands_with_float32_gradients(operands):
    rows, weight, bias, gradient = operands
    with Bfloat16Products():
        out = functional.linear(rows, weight, bias)
    out.backward(gradient)
    with torch.no_grad():
        wanted = rounded(rows) @ rounded(weight).T + rounded(bias)
        of_rows = rounded(gradient) @ rounded(weight)
        of_weight = rounded(gradient).flatten(0, 1).T @ rounded(rows).flatten(0, 1)
    assert {out.dtype, rows.grad.dtype, weight.grad.dtype, bias.grad.dtype} == {torch.float32}
    for found, expected in ((out, wanted), (rows.grad, of_rows), (weight.grad, of_weight)):
        # A result is rounded once more, to 8 bits of mantissa.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-7)
    assert not torch.equal(out, functional.linear(rows, weight, bias))


def test_what_is_no_linear_layer_or_not_float32_is_left_alone(operands):
    rows, weight, bias, _ = operands
    double = [values.detach().double() for values in (rows, weight, bias)]
    scores = rows @ weight.T
    with Bfloat16Products():
        assert torch.equal(rows @ weight.T, scores)
        assert torch.equal(torch.softmax(scores, -1), torch.softmax(scores.clone(), -1))
        found = functional.linear(*double)
    assert torch.equal(found, functional.linear(*double))


def test_a_model_comes_to_about_the_same_loss(bigram, text, config, record):
    last = {}
    for precision in ("float32", "bfloat16"):
        seen = record()
        Trainer(bigram(), text, config.replace(precision=precision)).run(seen, StopFlag())
        last[precision] = seen.losses[30]
        assert last[precision] < seen.losses[1] - 0.3
    assert last["float32"] != last["bfloat16"]
    assert last["bfloat16"] == pytest.approx(last["float32"], rel=0.02)


def test_weights_and_moments_stay_in_float32(bigram, text, config, record):
    model = bigram()
    trainer = Trainer(model, text, config.replace(precision="bfloat16"))
    trainer.run(record(), StopFlag())
    kept = [*model.state_dict().values(), *(m for s in trainer._optimizer.state.values() for m in s.values())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_the_second_moment_comes_down_and_averages_follow_steps_that_bfloat16_would_round_away():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw([weight], OptimizerConfig(beta2=0.999, learning_rate=1e-9).with_defaults(), set())
    module = torch.nn.Module()
    module.weight = weight
    average, moment, mean = WeightAverage(module, 0.999), 0.0, 1.0
    for step in range(2000):
        weight.grad = torch.full((3,), 1e-3 if step else 100.0)
        optimizer.step()
        weight.data.fill_(1 + step * 1e-6)
        average.update()
        moment = 0.999 * moment + 0.001 * weight.grad[0].item() ** 2
        mean = 0.999 * mean + 0.001 * weight[0].item()
    assert moment < 2
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], torch.full((3,), moment), rtol=1e-3, atol=0)
    torch.testing.assert_close(next(iter(average.state().values())), torch.full((3,), mean), rtol=1e-5, atol=0)


class CountedProduct(ProductKernel):
    """Counts what it is asked, and says two times what it should."""

    name = "counted"
    summary = "for tests"
    accepts: ClassVar = {"gradients": Anything()}
    asked = 0

    def cost(self, _problem):
        return 0.1

    def linear(self, rows, weight, bias):
        self.asked += 1
        return 2 * functional.linear(rows, weight, bias)

    def product(self, left, right, to=None):
        raise NotImplementedError


def only(kernel, monkeypatch):
    """This kernel, made the only one for products."""

    def problem(dtype, multiplied_in, **_others):
        return ProductProblem(dtype=dtype, gradients=True, multiplied_in=multiplied_in)

    operation = Operation([kernel], ProductKernel, problem)
    monkeypatch.setattr("attn_core.kernels.product.installed_operation", lambda _kind: operation)
    return kernel


def test_large_products_in_float32_are_those_of_the_kernel_that_is_chosen(monkeypatch):
    kernel = only(CountedProduct(), monkeypatch)
    rows, weight = torch.ones(64, 512), torch.ones(64, 512, requires_grad=True)
    with Float32Products():
        assert functional.linear(rows, weight)[0, 0] == 1024
        assert functional.linear(rows[:8], weight)[0, 0] == 512, "a small product is torch's"
        assert functional.linear(rows.double(), weight.double())[0, 0] == 512
        assert (rows @ weight.T)[0, 0] == 512
        with FlopCounterMode(display=False) as counter:
            assert functional.linear(rows, weight)[0, 0] == 512, "what counts torch's operations sees torch's"
    assert counter.get_total_flops() == 2 * 64 * 64 * 512
    assert kernel.asked == 1


@pytest.mark.parametrize(("precision", "apart"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_step_by_the_kernels_of_this_machine_comes_to_the_loss_of_torchs(
    bigram, text, config, record, monkeypatch, precision, apart
):
    last = []
    for smallest in (0, 1 << 62):
        monkeypatch.setattr("attn_core.kernels.product.SMALLEST_PRODUCT", smallest)
        monkeypatch.setattr("attn_core.kernels.product.SMALLEST_ACTIVATION", smallest)
        seen = record()
        Trainer(bigram(), text, config.replace(precision=precision)).run(seen, StopFlag())
        last.append(seen.losses[30])
    assert last[0] == pytest.approx(last[1], rel=apart)


class CountedRoundedProduct(CountedProduct):
    """The same of operands in bfloat16."""

    accepts: ClassVar = {**CountedProduct.accepts, "multiplied_in": OneOf("bfloat16")}


def test_large_products_in_bfloat16_are_those_of_the_kernel_that_is_chosen(monkeypatch):
    kernel = only(CountedRoundedProduct(), monkeypatch)
    rows, weight = torch.ones(64, 512), torch.ones(64, 512, requires_grad=True)
    with Float32Products():
        assert functional.linear(rows, weight)[0, 0] == 512, "a kernel that rounds is not for float32"
    with Bfloat16Products():
        assert functional.linear(rows, weight)[0, 0] == 1024
        assert functional.linear(rows.double(), weight.double())[0, 0] == 512
        with FlopCounterMode(display=False) as counter:
            assert functional.linear(rows, weight)[0, 0] == 512, "what counts torch's operations sees torch's"
    assert counter.get_total_flops() == 2 * 64 * 64 * 512
    assert kernel.asked == 1


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("mechanism", ["gqa", "qk_norm", "gated", "mla"])
def test_gradients_by_the_kernels_of_this_machine_are_those_of_torchs(mechanism, adapters, monkeypatch):
    """Norms, gates, rotary positions and layers with adapters, whole and of one in two."""
    torch.manual_seed(4)
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16}
    fields = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "vocab_size": 31, "mechanism": mechanism}
    model = Decoder(DecoderConfig(**small, **fields)).double()
    if adapters:
        model.requires_grad_(requires_grad=False)
        adapter = LoraAdapter.fresh(model, AdapterConfig(r=3, lora_alpha=6.0), modules={}).double()
        for parameter in adapter.parameters():
            parameter.data.normal_(std=0.3)
        AdaptedModel(model).always(adapter)
        model.add_module("adapter", adapter)
    weights = [part for part in model.parameters() if part.requires_grad]
    tokens, targets = torch.randint(0, 31, (2, 3, 12))
    wanted_loss = model.next_token_loss(tokens, targets)
    wanted = torch.autograd.grad(wanted_loss, weights, allow_unused=True)
    monkeypatch.setattr("attn_core.kernels.product.SMALLEST_PRODUCT", 0)
    model.float()
    with Float32Products():
        loss = model.next_token_loss(tokens, targets)
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(loss, weights, allow_unused=True), wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max().item())
