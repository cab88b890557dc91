import pytest
import torch
from attn_variants.distributions import entmax, entmax15, softmax, sparsemax

GOLDEN = [1.0, 0.5, -1.0, 0.9]


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def at(alpha):
    return lambda scores, allowed=None: entmax(scores, allowed, alpha - 1)


def test_golden_numbers_of_four_scores():
    expected = torch.tensor([0.4451, 0.1740, 0, 0.3809], dtype=torch.float64)
    assert torch.allclose(entmax15(torch.tensor(GOLDEN, dtype=torch.float64), None), expected, rtol=0, atol=5e-5)


def test_sorting_and_bisection_agree_at_one_and_a_half():
    scores = 2 * doubles(30, 17)
    assert torch.allclose(entmax15(scores, None), at(1.5)(scores), rtol=0, atol=1e-14)


def test_alpha_two_is_sparsemax_and_alpha_near_one_is_softmax(agrees):
    scores = doubles(30, 9)
    agrees("entmax", identity="alpha 2 is sparsemax").outputs(at(2.0)(scores), sparsemax(scores, None), 1e-14)
    assert torch.allclose(at(1 + 1e-6)(scores), softmax(scores, None), rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", [lambda s: entmax15(s, None), at(1.2), at(1.9), at(3.0)])
def test_gradients_equal_finite_differences(function):
    scores = doubles(4, 7).requires_grad_()
    assert torch.autograd.gradcheck(function, scores)
    assert torch.autograd.gradgradcheck(function, scores)


def test_the_gradient_to_alpha_equals_finite_differences():
    scores, alpha = doubles(4, 7), torch.tensor([[1.3], [1.5], [1.8], [2.0]], dtype=torch.float64)
    allowed = torch.rand(4, 7) > 0.3
    inputs = (scores.requires_grad_(), alpha.requires_grad_())
    assert torch.autograd.gradcheck(lambda s, a: entmax(s, allowed, a - 1), inputs)
    assert torch.autograd.gradgradcheck(lambda s, a: entmax(s, allowed, a - 1), inputs)


@pytest.mark.parametrize("excess", [2.3e-16, 1e-6, 3e-4, 1e-2, 1.0, 31.0])
def test_rows_sum_to_one_in_float32_for_every_alpha(excess):
    scores = 3 * torch.randn(50, 33)
    weights = entmax(scores, None, excess)
    assert torch.allclose(weights.sum(-1), torch.ones(50), rtol=0, atol=1e-5)
    assert torch.allclose(weights, entmax(scores.double(), None, excess).float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("function", [entmax15, at(1.3)])
def test_masked_scores_change_nothing_and_empty_rows_give_zeros(function):
    scores, allowed = doubles(6, 5).requires_grad_(), torch.tensor([True, False, True, True, False])
    weights = function(scores, allowed)
    assert torch.equal(weights[:, ~allowed], torch.zeros(6, 2, dtype=torch.float64))
    assert torch.allclose(weights[:, allowed], function(scores[:, allowed], None), rtol=0, atol=1e-15)
    nothing = function(scores, torch.zeros(5, dtype=torch.bool))
    (nothing * doubles(6, 5)).sum().backward()
    assert torch.equal(nothing, torch.zeros(6, 5, dtype=torch.float64))
    assert torch.equal(scores.grad, torch.zeros(6, 5, dtype=torch.float64))


@pytest.mark.parametrize("largest", [1e3, 1e30])
def test_large_scores_neither_overflow_nor_lose_the_sum(largest):
    scores = torch.tensor([largest, largest, -largest], dtype=torch.float64)
    for weights in (entmax15(scores, None), at(1.2)(scores)):
        assert torch.allclose(weights, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0])
def test_weights_and_gradients_are_those_of_entmax(agrees, alpha):
    import entmax as peer

    scores, alphas = 2 * doubles(40, 17), torch.full((40, 1), alpha, dtype=torch.float64)
    for name in ("entmax", "adaptive_entmax"):
        oracle = agrees(name, package="entmax entmax_bisect")
        oracle.functions(
            lambda s, a: entmax(s, None, a - 1),
            lambda s, a: peer.entmax_bisect(s, a, dim=-1, n_iter=60),
            scores,
            alphas,
            tolerance=1e-8,
        )
        oracle.outputs(entmax(scores, None, alphas - 1), peer.entmax_bisect(scores, alphas, dim=-1, n_iter=60), 1e-13)


@pytest.mark.oracle
def test_the_exact_form_is_entmax15_of_entmax(agrees):
    import entmax as peer

    oracle = agrees("entmax", package="entmax entmax15")
    oracle.functions(
        lambda s: entmax15(s, None), lambda s: peer.entmax15(s, dim=-1), 2 * doubles(40, 17), tolerance=1e-12
    )
