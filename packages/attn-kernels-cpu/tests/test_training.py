"""Kernels of training give the numbers and gradients of torch in float64, for any shape, and the same bits twice."""

from __future__ import annotations

import pytest
import torch
from attn_core.dropout import Dropout
from attn_core.errors import InvalidValue
from attn_core.kernels.dispatch import explain
from attn_core.kernels.product import ProductProblem, WholeAttentionProblem
from attn_kernels_cpu import chip
from attn_kernels_cpu.attention import attention
from attn_kernels_cpu.library import loaded, trouble
from attn_kernels_cpu.products import activated, linear, product, rounded_linear, rounded_product
from attn_kernels_cpu.training import CpuAttention, CpuProduct, CpuRoundedProduct
from torch.nn import functional

EPS = torch.finfo(torch.float32).eps
SIZES = [(1, 1, 1), (5, 7, 3), (13, 130, 17), (100, 33, 270), (490, 400, 48), (0, 4, 5), (3, 0, 4), (4, 5, 0)]
"""Rows, inputs and outputs, below and above the blocks that the kernels cut matrices into."""


def with_gradients(compute, operands, change):
    """The result of `compute` and the gradients of its operands."""
    leaves = [part.detach().clone().requires_grad_() for part in operands]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, change)]


def bounds(operands, change):
    """What rounding may change of a linear layer and its gradients: every sum by its length and what it adds up."""
    rows, weight, bias = (part.double().abs() for part in operands)
    large = change.double().abs()
    sums = rows @ weight.T + bias, large @ weight, large.T @ rows, large.sum(0)
    lengths = rows.shape[1] + 1, weight.shape[0], rows.shape[0], rows.shape[0]
    return [length * EPS * total + 1e-30 for length, total in zip(lengths, sums, strict=True)]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear_layers_and_their_gradients_round_as_float32_does(sizes):
    torch.manual_seed(3)
    rows, inputs, outputs = sizes
    operands = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    change = torch.randn(rows, outputs)
    found = with_gradients(linear, operands, change)
    wanted = with_gradients(functional.linear, [part.double() for part in operands], change.double())
    for one, other, bound in zip(found, wanted, bounds(operands, change), strict=True):
        assert one.dtype == torch.float32
        assert ((one.double() - other).abs() <= bound).all()


def rounded(values):
    """What bfloat16 keeps of them, as float64."""
    return values.to(torch.bfloat16).double()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("sizes", [*SIZES, (37, 401, 600)], ids=str)
def test_rounded_layers_multiply_what_bfloat16_keeps_and_add_in_float32(sizes):
    torch.manual_seed(8)
    rows, inputs, outputs = sizes
    operands = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    change = torch.randn(rows, outputs)
    found = with_gradients(rounded_linear, operands, change)
    (x, w), bias, g = map(rounded, operands[:2]), operands[2].double(), rounded(change)
    wanted = [x @ w.T + bias, g @ w, g.T @ x, change.double().sum(0)]
    for one, other, bound in zip(found, wanted, bounds(operands, change), strict=True):
        assert one.dtype == torch.float32
        assert ((one.double() - other).abs() <= 2 * bound).all()


@pytest.mark.usefixtures("_kernels")
def test_rounding_a_product_is_not_left_out():
    torch.manual_seed(9)
    left, right = torch.randn(20, 90), torch.randn(90, 33)
    exact, sums = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert ((product(left, right) - exact).abs() <= 90 * EPS * sums).all()
    assert ((rounded_product(left, right) - exact).abs() > 90 * EPS * sums).any()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("product", [product, rounded_product])
def test_a_product_has_the_same_bits_on_any_number_of_threads_and_of_any_view(product):
    torch.manual_seed(4)
    left, right = torch.randn(301, 500), torch.randn(500, 77)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            found.append(product(left, right))
    finally:
        torch.set_num_threads(before)
    found.append(product(left.T.contiguous().T, right))
    found.append(product(left, right.T.contiguous().T))
    found.append(product(left.repeat_interleave(2, 1)[:, ::2], right))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("product", [product, rounded_product])
def test_numbers_that_are_not_finite_reach_their_rows_and_columns_alone(product):
    left, right = torch.ones(20, 30), torch.ones(30, 40)
    left[7, 3], right[4, 9] = torch.inf, torch.nan
    found = product(left, right)
    assert found[7, 0] == torch.inf
    assert found[:, 9].isnan().all()
    rest = found[torch.arange(20) != 7][:, torch.arange(40) != 9]
    assert (rest == 30).all()


@pytest.mark.usefixtures("_best_kernels")
def test_gradients_are_computed_where_they_are_wanted_alone():
    rows, weight, bias = torch.randn(2, 3, 5), torch.randn(4, 5, requires_grad=True), torch.randn(4)
    out = linear(rows, weight, bias)
    assert out.shape == (2, 3, 4)
    out.sum().backward()
    torch.testing.assert_close(weight.grad, rows.flatten(0, 1).sum(0).expand(4, 5))
    assert rows.grad is None
    assert linear(rows[0, 0], weight).shape == (4,)


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize(
    ("left", "right", "bias", "field"),
    [
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 4), None, "left"),
        (torch.ones(2, 3), torch.ones(4, 3), None, "right"),
        (torch.ones(2, 3), torch.ones(3), None, "right"),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(3), "bias"),
    ],
)
def test_what_is_no_product_of_float32_is_refused_by_name(left, right, bias, field):
    for refusing in (product, rounded_product):
        with pytest.raises(InvalidValue, match=field):
            refusing(left, right, bias)
    with pytest.raises(InvalidValue, match="rows"):
        linear(torch.ones(2, 3), torch.ones(4, 5))


DEFINITIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", DEFINITIONS)
@pytest.mark.parametrize("count", [0, 1, 37, 20001])
def test_activations_and_their_gradients_are_those_of_their_definition(form, count):
    torch.manual_seed(5)
    rows, change = torch.linspace(-14, 14, count) + torch.rand(count) / 1000, torch.randn(count)
    found = with_gradients(lambda part: activated(part, form), [rows], change)
    wanted = with_gradients(DEFINITIONS[form], [rows.double()], change.double())
    assert ((found[0] - wanted[0]).abs() <= 2e-7 * (1 + rows.abs())).all()
    assert ((found[1] - wanted[1]).abs() <= 1e-6 * change.abs()).all()
    assert torch.equal(found[1], with_gradients(lambda part: activated(part, form), [rows], change)[1])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", DEFINITIONS)
def test_activations_of_what_is_far_out_or_not_finite(form):
    rows = torch.tensor([torch.inf, 3e38, 200, -200, -3e38, -torch.inf, torch.nan])
    value, slope = with_gradients(lambda part: activated(part, form), [rows], torch.ones(7))
    assert torch.equal(value[:3], rows[:3])
    assert torch.equal(slope[:3], torch.ones(3))
    assert (value[3:6].abs() < 1e-30).all()
    assert (slope[3:6].abs() < 1e-30).all()
    assert value[6].isnan()
    assert slope[6].isnan()


@pytest.mark.usefixtures("_best_kernels")
def test_an_activation_of_another_name_or_type_is_refused():
    with pytest.raises(InvalidValue, match="form"):
        activated(torch.ones(3), "tanh")
    with pytest.raises(InvalidValue, match="rows"):
        activated(torch.ones(3).double(), "gelu")
    turned = torch.randn(5, 7).T
    assert torch.equal(activated(turned, "silu"), activated(turned.contiguous(), "silu"))


HEADS = [
    (2, 4, 2, 7, 7, 5, 3),
    (1, 2, 2, 130, 130, 32, 32),
    (2, 4, 1, 100, 133, 20, 24),
    (1, 1, 1, 1, 1, 1, 1),
    (0, 2, 2, 5, 5, 4, 4),
]
"""Sequences, heads, shared heads, queries, keys and the sizes of keys and of values."""


def heads_of(sizes):
    torch.manual_seed(6)
    batch, heads, shared, queries, keys, size, value_size = sizes
    rows = torch.randn(batch, queries, heads, size), torch.randn(batch, keys, shared, size)
    made = (*rows, torch.randn(batch, keys, shared, value_size))
    return [part.transpose(1, 2) for part in made], torch.randn(batch, heads, queries, value_size)


def defined_attention(causal, scale, dropout=None):
    """Of the equation, in the type of its operands; dropout keeps the pairs that its contract says."""

    def compute(query, key, value):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = scale * query @ key.transpose(2, 3)
        queries, keys = scores.shape[2:]
        unseen = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
        weights = scores.masked_fill(unseen & causal, -torch.inf).softmax(-1)
        if dropout is not None:
            row = torch.arange(weights.shape[0] * weights.shape[1]).view(*weights.shape[:2], 1, 1)
            row = row + dropout.first * weights.shape[1]
            weights = weights * dropout.kept(row, torch.arange(queries)[:, None], torch.arange(keys)) * dropout.scale
        return weights @ value

    return compute


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_attention_and_its_gradients_round_as_float32_does(sizes, causal):
    operands, change = heads_of(sizes)
    found = with_gradients(lambda *rows: attention(*rows, causal=causal, scale=0.3), operands, change)
    wanted = with_gradients(defined_attention(causal, 0.3), [part.double() for part in operands], change.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("_kernels")
def test_attention_has_the_same_bits_on_any_number_of_threads_and_far_scores_do_not_overflow():
    operands, change = heads_of((2, 4, 2, 70, 70, 16, 16))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(with_gradients(lambda *rows: attention(*rows, causal=True, scale=1e4), operands, change))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))
    assert all(part.isfinite().all() for part in found[0])
    first = operands[2][:, :, :1].repeat_interleave(2, 1)
    torch.testing.assert_close(found[0][0][:, :, :1], first)  # one key is all that it sees


@pytest.mark.usefixtures("_best_kernels")
def test_attention_of_other_shapes_is_refused_by_name():
    rows = torch.ones(1, 2, 3, 4)
    for name, operands in {
        "query": (rows.double(), rows, rows),
        "key": (rows, rows[:, :, :2], rows[:, :, :2]),
        "value": (rows, rows, rows[:, :1]),
    }.items():
        with pytest.raises(InvalidValue, match=name):
            attention(*operands, causal=True, scale=1.0)
    with pytest.raises(InvalidValue, match="key"):
        attention(rows, rows[:, :0], rows[:, :0], causal=False, scale=1.0)


DROPOUT = Dropout(probability=0.3, seed=0xFEDC_BA98_7654_3210, offset=5, first=3)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_attention_drops_the_weights_that_the_seed_says_and_so_do_its_gradients(sizes, causal):
    operands, change = heads_of(sizes)
    found = with_gradients(lambda *rows: attention(*rows, causal=causal, scale=0.3, dropout=DROPOUT), operands, change)
    defined = defined_attention(causal, 0.3, DROPOUT)
    wanted = with_gradients(defined, [part.double() for part in operands], change.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("probability", [0.0, 0.5, 1 - 2**-34])
def test_attention_keeps_exactly_the_pairs_of_the_mask(probability):
    """With equal scores and values of one key each, outputs are the weights themselves."""
    keys, dropout = 131, Dropout(probability=probability, seed=9)
    nothing = torch.zeros(2, 1, keys, 4)
    found = attention(nothing, nothing, torch.eye(keys).expand(2, 1, -1, -1), causal=False, scale=1.0, dropout=dropout)
    places = torch.arange(keys)
    kept = dropout.kept(torch.arange(2).view(2, 1, 1, 1), places[:, None], places)
    assert torch.equal(found != 0, kept)
    torch.testing.assert_close(found, kept * (dropout.scale / keys))


@pytest.mark.usefixtures("_kernels")
def test_no_dropout_and_dropout_of_nothing_have_the_same_bits():
    operands, change = heads_of((2, 4, 1, 100, 133, 20, 24))
    none, nothing = (
        with_gradients(lambda *rows, d=dropout: attention(*rows, causal=True, scale=0.3, dropout=d), operands, change)
        for dropout in (None, Dropout(probability=0.0, seed=9))
    )
    assert all(torch.equal(one, other) for one, other in zip(none, nothing, strict=True))


@pytest.mark.usefixtures("_kernels")
def test_attention_with_dropout_has_the_same_bits_on_any_number_of_threads():
    operands, change = heads_of((2, 4, 2, 70, 70, 16, 16))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                with_gradients(
                    lambda *rows: attention(*rows, causal=True, scale=0.3, dropout=DROPOUT), operands, change
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))


def test_attention_with_dropout_has_the_same_bits_from_every_instruction_set(with_both):
    operands, change = heads_of((2, 4, 2, 70, 83, 16, 24))
    for one, other in with_both(
        lambda: with_gradients(
            lambda *rows: attention(*rows, causal=True, scale=0.3, dropout=DROPOUT), operands, change
        )
    ):
        assert torch.equal(one, other)


def test_dropout_is_taken_on_chips_of_every_vendor(monkeypatch):
    if reason := CpuAttention().available() or trouble():
        pytest.skip(reason)
    monkeypatch.setattr(chip, "vendor", lambda: "GenuineIntel")
    for dropout in (False, True):
        (verdict,) = explain([CpuAttention()], WholeAttentionProblem(dropout=dropout, gradients=True))
        assert verdict.accepted == dropout


@pytest.mark.parametrize("vendor", [chip.AMD, "GenuineIntel", ""])
def test_products_are_taken_from_torch_where_torch_is_as_fast(monkeypatch, vendor):
    monkeypatch.setattr(chip, "vendor", lambda: vendor)
    (verdict,) = explain([CpuProduct()], ProductProblem(gradients=True))
    if verdict.kernel.available() is None:
        assert verdict.accepted == (vendor == chip.AMD)
        assert not verdict.accepted or (verdict.cost < 1) == (loaded().isa.name != "avx2")
    for other in (ProductProblem(dtype="bfloat16"), ProductProblem(multiplied_in="bfloat16")):
        assert not explain([CpuProduct()], other)[0].accepted
    (rounding,) = explain([CpuRoundedProduct()], ProductProblem(multiplied_in="bfloat16", gradients=True))
    assert rounding.accepted == verdict.accepted
    assert not explain([CpuRoundedProduct()], ProductProblem(gradients=True))[0].accepted


def test_the_vendor_is_read_from_the_system(tmp_path):
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t: avx2\n")
    assert chip.vendor(told) == chip.AMD
    silent = tmp_path / "silent"
    silent.write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert chip.vendor(silent) == chip.vendor(tmp_path / "none") == ""
