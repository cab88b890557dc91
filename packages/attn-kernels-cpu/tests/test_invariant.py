"""Forward passes whose results do not depend on other rows: they are PyTorch's, with its gradients, and fail closed."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Incompatible
from attn_core.kernels.base import batch_invariant
from attn_kernels_cpu.invariant import BatchInvariant
from attn_kernels_cpu.packed import PackedLinear
from attn_kernels_cpu.sampling import CpuSampling
from attn_variants.distributions import softmax
from torch.nn import functional

WIDE, OUT = 37, 21
FUNCTIONS = {
    "linear": lambda x: functional.linear(x, WEIGHT, BIAS),
    "matmul": lambda x: x @ WEIGHT.T,
    "einsum": lambda x: torch.einsum("bi,oi->bo", x, WEIGHT),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, -1, keepdim=True), -1),
    "layer_norm": lambda x: functional.layer_norm(x, (WIDE,), WEIGHT[0], WEIGHT[1]),
    "rms_norm": lambda x: functional.rms_norm(x, (WIDE,), WEIGHT[0], 1e-5),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "exp2": torch.exp2,
    "power": lambda x: (x.abs() + 0.1) ** 1.7,
    "base": lambda x: 1.3**x,
    "prod": lambda x: x.prod(-1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
}
torch.manual_seed(0)
WEIGHT, BIAS = torch.randn(OUT, WIDE), torch.randn(OUT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_gradients(name, dtype):
    rows = torch.randn(19, WIDE).to(dtype)
    compute = FUNCTIONS[name]
    if dtype != torch.float32 and name in ("linear", "matmul", "einsum", "layer_norm", "rms_norm"):
        pytest.skip("the weights are float32")
    with BatchInvariant():
        whole = compute(rows)
        for first, last in ((0, 1), (1, 4), (4, 19)):
            with torch.no_grad():
                assert torch.equal(compute(rows[first:last]), whole[first:last])
    assert not batch_invariant()
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(whole, compute(rows), **tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_pytorch(name):
    first, second = (torch.linspace(-2, 2, 3 * WIDE).view(3, WIDE).requires_grad_() for _ in range(2))
    with BatchInvariant():
        ours = FUNCTIONS[name](first)
    change = torch.randn(ours.shape)
    ours.backward(change)
    FUNCTIONS[name](second).backward(change)
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-5)


def test_terms_that_are_zero_change_no_bit_wherever_they_are():
    weights, values = torch.rand(50, 40), torch.randn(40, 8)
    holes = torch.zeros(50, 73), torch.zeros(73, 8)
    places = torch.randperm(73)[:40].sort().values
    holes[0][:, places], holes[1][places] = weights, values
    with BatchInvariant(), torch.no_grad():
        assert torch.equal(weights @ values, holes[0] @ holes[1])
        assert torch.equal(weights.sum(-1), holes[0].sum(-1))
        scores = torch.full_like(holes[0], -torch.inf)
        scores[:, places] = weights
        assert torch.equal(weights.softmax(-1), scores.softmax(-1)[:, places])


def test_weights_of_a_query_without_keys_are_zeros_without_a_gradient():
    scores = torch.randn(3, 5, requires_grad=True)
    allowed = torch.tensor([True, False, True])[:, None]
    with BatchInvariant():
        weights = softmax(scores, allowed)
    (weights * torch.randn(3, 5)).sum().backward()
    assert weights.sum(-1).tolist() == pytest.approx([1, 0, 1])
    assert scores.grad.abs().sum(-1).bool().tolist() == [True, False, True]


def test_the_sampling_kernel_tells_the_bits_of_log_softmax():
    rows = torch.randn(3, 700) * 5
    with BatchInvariant():
        logs = rows.log_softmax(-1)
    for row, token, (own, top) in zip(
        logs, (5, 0, 699), CpuSampling().log_probabilities(rows, [5, 0, 699], 4), strict=True
    ):
        assert own == row[token]
        assert top == list(zip(row.topk(4).indices.tolist(), row.topk(4).values.tolist(), strict=True))


def test_packed_weights_give_the_bits_of_unpacked_ones():
    rows = torch.randn(7, WIDE)
    with BatchInvariant(), torch.no_grad():
        assert torch.equal(PackedLinear("float32", WEIGHT, BIAS)(rows), functional.linear(rows, WEIGHT, BIAS))


def test_an_operation_that_has_no_such_computation_is_refused_by_name():
    with BatchInvariant(), pytest.raises(Incompatible, match=r"aten\.mish"):
        functional.mish(torch.randn(3))
    with BatchInvariant(), pytest.raises(Incompatible, match=r"scaled_dot_product"):
        functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
