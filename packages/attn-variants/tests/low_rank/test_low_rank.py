import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import UserError
from attn_variants.mechanisms.low_rank_layers import LowRank, basis


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_cl_11_what_is_lost_is_the_sum_of_the_squares_of_the_other_singular_values(rank):
    matrix = rows(2, 9, 4)
    vectors = basis(matrix, rank)
    lost = (matrix - matrix @ vectors @ vectors.mT).square().sum((-1, -2))
    expected = torch.linalg.svdvals(matrix)[..., rank:].square().sum(-1)
    assert torch.allclose(lost, expected, rtol=1e-12, atol=1e-12)


def test_at_the_full_rank_it_is_softmax_attention(build, agrees):
    layer = build("low_rank", {"rank": 4}, hidden_size=12, num_heads=3, causal=False)
    full = build("mha", hidden_size=12, num_heads=3, causal=False)
    full.load_state_dict(layer.state_dict())
    agrees("low_rank", identity="the full rank is mha").functions(layer, full, rows(2, 7, 12), tolerance=1e-9)


def test_each_output_is_softmax_attention_over_truncated_singular_values(agrees):
    query, key, value = rows(1, 2, 6, 5), rows(1, 2, 6, 5), rows(1, 2, 6, 5)

    def truncated(matrix):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values[..., 3:] = 0
        return left @ torch.diag_embed(values) @ right

    weights = (query @ truncated(key).mT / 5**0.5).softmax(-1)
    oracle = agrees("low_rank", package="torch linalg.svd")
    oracle.outputs(LowRank(3)(query, key, value, None), weights @ truncated(value), 1e-12)


def test_gradients_equal_those_through_torchs_singular_values(agrees):
    inputs = [rows(1, 1, 6, 4).requires_grad_() for _ in range(3)]

    def by_svd(query, key, value, key_padding_mask):
        def truncated(matrix):
            left, values, right = torch.linalg.svd(matrix, full_matrices=False)
            return (left[..., :2] * values[..., None, :2]) @ right[..., :2, :]

        return (query @ truncated(key).mT / 2).softmax(-1) @ truncated(value)

    found = []
    for attend in (LowRank(2), by_svd):
        out = attend(*inputs, None)
        found.append(torch.autograd.grad((out * torch.arange(24.0).view_as(out)).sum(), inputs))
    agrees("low_rank", package="torch linalg.svd").gradients(*found, 1e-9)


def test_gradients_are_finite_where_the_rank_is_more_than_the_tokens():
    inputs = [rows(1, 1, 2, 5).requires_grad_() for _ in range(3)]
    LowRank(4)(*inputs, None).square().sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in inputs)


@pytest.mark.parametrize("rank", [0, 5, -1])
def test_a_rank_that_no_head_has_is_refused(rank):
    with pytest.raises(UserError):
        configure(installed().mechanisms.get("low_rank"), {"rank": rank}, hidden_size=12, num_heads=3, causal=False)
