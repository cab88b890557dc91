"""Linear layers may multiply in bfloat16 while a model is trained; everything else stays in float32."""

from __future__ import annotations

import pytest
import torch
from attn_train.precision import Bfloat16Products
from attn_train.records import StopFlag
from attn_train.trainer import Trainer
from torch.nn import functional


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
