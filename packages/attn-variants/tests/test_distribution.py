import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Heads
from attn_core.distributions import Distribution
from attn_core.errors import InvalidValue
from attn_variants.compute import plain
from attn_variants.distributions import softmax, sparsemax


def projection(scores):
    """The simplex projection by trying every support size."""
    ordered = sorted(scores, reverse=True)
    for size in range(len(ordered), 0, -1):
        threshold = (sum(ordered[:size]) - 1) / size
        if ordered[size - 1] > threshold:
            return [max(score - threshold, 0.0) for score in scores]
    raise ValueError("no support")


def test_sparsemax_is_the_projection_onto_the_simplex(agrees):
    scores = torch.randn(20, 9, dtype=torch.float64) * 2
    expected = torch.tensor([projection(row) for row in scores.tolist()], dtype=torch.float64)
    agrees("sparsemax", paper="every support size tried").outputs(sparsemax(scores, None), expected, 1e-14)


def test_sparsemax_shares_between_equal_scores():
    weights = sparsemax(torch.tensor([2.0, 2.0, 2.0, 0.0], dtype=torch.float64), None)
    assert torch.allclose(weights, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=torch.float64))


@pytest.mark.parametrize("function", [softmax, sparsemax])
def test_masked_scores_change_nothing(function):
    scores = torch.randn(6, 5, dtype=torch.float64)
    allowed = torch.tensor([True, False, True, True, False])
    weights = function(scores, allowed)
    assert torch.equal(weights[:, ~allowed], torch.zeros(6, 2, dtype=torch.float64))
    assert torch.allclose(weights[:, allowed], function(scores[:, allowed], None), rtol=0, atol=1e-15)


@pytest.mark.parametrize("function", [softmax, sparsemax])
def test_a_row_without_keys_gives_zeros_and_no_gradient(function):
    scores = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([[True] * 4, [False] * 4])
    weights = function(scores, allowed)
    (weights * torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert torch.equal(weights[1], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(scores.grad[1], torch.zeros(4, dtype=torch.float64))
    assert scores.grad[0].abs().sum() > 0
    assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize("largest", [710.0, 1e30])
def test_softmax_of_large_scores_does_not_overflow(largest):
    weights = softmax(torch.tensor([largest, largest, -largest], dtype=torch.float64), None)
    assert torch.equal(weights, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("function", [softmax, sparsemax])
def test_gradients_equal_finite_differences(function):
    scores = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    allowed = torch.rand(3, 6) > 0.3
    assert torch.autograd.gradcheck(lambda given: function(given, allowed), scores)


def test_an_unknown_distribution_is_refused_by_name():
    class Uniform(Distribution):
        kind = "uniform"
        equation = ""

    spec = AttentionSpec(heads=Heads(query=1, key_value=1, key_size=2, value_size=2), distribution=Uniform())
    rows = torch.zeros(1, 3, 1, 2)
    with pytest.raises(InvalidValue, match="uniform"):
        plain.attend(spec, AttentionInputs(query=rows, key=rows, value=rows))


@pytest.mark.oracle
@pytest.mark.parametrize("package", ["entmax", "sparsemax"])
def test_sparsemax_and_its_gradient_are_those_of_two_packages(agrees, package):
    if package == "entmax":
        from entmax import sparsemax as theirs
    else:
        from sparsemax import Sparsemax

        theirs = Sparsemax(dim=-1)
    scores = torch.randn(40, 17, dtype=torch.float64)
    oracle = agrees("sparsemax", package=f"{package} sparsemax")
    oracle.functions(lambda s: sparsemax(s, None), lambda s: theirs(s), scores, tolerance=1e-14)
