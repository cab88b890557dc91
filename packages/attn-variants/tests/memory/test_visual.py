import pytest
import torch
from attn_core import Shape, configure, installed
from attn_core.errors import InvalidValue
from attn_core.reinforce import MovingBaseline, SampledKeys, reinforce_loss
from attn_variants.reinforce import sample_keys


def scores(layer, query, source):
    """vᵀ tanh(W_a a_i + W_d h + b) [query, key] of one head, from the layer's own projections."""
    part = layer.score.named()
    asked = query @ layer.query.weight.T @ part["query_weight"][0] + part["bias"][0]
    known = source @ layer.key.weight.T @ part["key_weight"][0]
    return torch.tanh(asked[:, None] + known[None]) @ part["vector"][0]


def seen(layer, query, source, weights):
    gate = torch.sigmoid(query @ layer.inner.gate.weight.T + layer.inner.gate.bias)
    return (gate * (weights @ (source @ layer.value.weight.T))) @ layer.output.weight.T


def lively(layer):
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight))
    return layer


@pytest.mark.parametrize("name", ["visual_soft", "visual_hard"])
def test_it_equals_the_equation_forward_and_gradient(build, agrees, name):
    layer = lively(build(name, hidden_size=5, num_heads=1)).eval()
    query = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    source = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    found = scores(layer, query, source)
    weights = found.softmax(-1) if name == "visual_soft" else torch.eye(4, dtype=found.dtype)[found.argmax(-1)]
    expected, out = seen(layer, query, source, weights), layer(query[None], source[None])[0]
    equation = agrees(name, paper="section 4, from the projected rows")
    equation.outputs(out, expected, 1e-12)
    probe = torch.randn_like(out)
    wanted = [query, source, layer.value.weight, layer.inner.gate.weight]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    equation.gradients(ours, theirs, 1e-11)


def test_alignment_equals_soft_attention_without_its_gate(build, agrees):
    soft, plain = (
        lively(build("visual_soft", hidden_size=6, num_heads=2)),
        build("alignment", hidden_size=6, num_heads=2),
    )
    plain.load_state_dict({name: value for name, value in soft.state_dict().items() if "inner" not in name})
    with torch.no_grad():
        soft.inner.gate.weight.zero_()
        soft.inner.gate.bias.fill_(100.0)
    query, source = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    same = agrees("visual_soft", identity="an open gate is alignment")
    same.functions(soft, plain, query, source, tolerance=1e-12)


def test_the_gradient_of_samples_is_on_average_that_of_the_expected_reward(agrees):
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log().requires_grad_()
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((shares.softmax(0) * rewards).sum(), shares)
    baseline = MovingBaseline(initial=0.0)
    baseline.update(torch.tensor(5.0))
    assert baseline.value == pytest.approx(0.5)
    mean = torch.zeros(4, dtype=torch.float64)
    for place in range(4):  # each sample, as often as it is drawn
        chance = shares.softmax(0)[place]
        samples = SampledKeys(chance.log().view(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.float64))
        loss = reinforce_loss([samples], rewards[place].view(1, 1), baseline.value)
        mean -= chance.detach() * torch.autograd.grad(loss, shares)[0]
    agrees("visual_hard", paper="REINFORCE over every possible draw").gradients([mean], [exact], 1e-15)


def test_a_baseline_near_the_mean_reward_lowers_the_variance():
    shares, rewards = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64), torch.tensor([9.0, 10.0, 11.0])
    spreads = []
    for value in (0.0, 10.1):
        gradients = torch.stack([(rewards[s] - value) * (torch.eye(3)[s] - shares) for s in range(3)])
        mean = (shares[:, None] * gradients).sum(0)
        spreads.append((shares[:, None] * (gradients - mean) ** 2).sum().item())
        made = []
        for place in range(3):
            logits = shares.log().requires_grad_()
            baseline = MovingBaseline(decay=0.0)
            baseline.update(torch.tensor(value, dtype=torch.float64))
            samples = SampledKeys(logits.log_softmax(0)[place].view(1, 1, 1), torch.zeros(1, 1, 1))
            made.append(
                -torch.autograd.grad(reinforce_loss([samples], rewards[place].view(1, 1), baseline.value), logits)[0]
            )
        assert torch.allclose(torch.stack(made), gradients, rtol=0, atol=1e-12)
    assert spreads[1] < spreads[0] / 50


def test_the_entropy_term_pulls_towards_equal_shares():
    logits = torch.tensor([2.0, 0.0], requires_grad=True)
    _, samples = sample_keys(logits.softmax(0).view(1, 1, 1, 2))
    (gradient,) = torch.autograd.grad(reinforce_loss([samples], torch.zeros(1, 1), entropy_weight=1.0), logits)
    assert gradient[0] > 0 > gradient[1]


def test_samples_follow_their_shares_and_never_touch_what_is_masked():
    shares = torch.tensor([0.5, 0.0, 0.25, 0.25]).expand(1, 1, 20000, 4)
    torch.manual_seed(0)
    drawn, samples = sample_keys(shares)
    assert torch.equal(drawn.sum(-1), torch.ones(1, 1, 20000))
    assert torch.allclose(drawn.mean((0, 1, 2)), shares[0, 0, 0], atol=0.015)
    assert drawn[..., 1].sum() == 0
    assert torch.allclose(samples.log_probability.exp(), (drawn * shares).sum(-1))
    nothing, _ = sample_keys(torch.zeros(1, 1, 3, 4))
    assert torch.equal(nothing, torch.zeros(1, 1, 3, 4))


@pytest.mark.parametrize(("rate", "drawn"), [(0.0, True), (1.0, False)])
def test_training_draws_or_takes_the_mean(build, rate, drawn):
    layer = lively(build("visual_hard", {"mean_rate": rate}, hidden_size=5, num_heads=1)).train()
    query, source = torch.randn(1, 3, 5, dtype=torch.float64), torch.randn(1, 4, 5, dtype=torch.float64)
    out = layer(query, source)
    weights = scores(layer, query[0], source[0]).softmax(-1)
    assert (layer.inner.samples is not None) == drawn
    assert torch.allclose(out[0], seen(layer, query[0], source[0], weights), rtol=0, atol=1e-12) != drawn
    if drawn:
        one_of = [seen(layer, query[0], source[0], torch.eye(4, dtype=torch.float64)[[s] * 3]) for s in range(4)]
        assert all(any(torch.allclose(out[0, row], option[row]) for option in one_of) for row in range(3))


def test_a_rate_that_is_no_share_is_refused():
    with pytest.raises(InvalidValue, match="mean_rate"):
        configure(installed().mechanisms.get("visual_hard"), {"mean_rate": 1.5}, hidden_size=8)


@pytest.mark.parametrize(("name", "options"), [("alignment", {}), ("visual_soft", {}), ("visual_hard", {})])
def test_without_projections_the_states_themselves_are_compared_and_summed(build, agrees, name, options):
    """α = softmax(vᵀ tanh(W_a s + U_a h + b)), c = Σ α h, pair by pair; Xu et al.'s gate opens it."""
    layer = lively(build(name, {"projections": "none", **options}, hidden_size=5)).eval()
    query, source = (torch.randn(count, 5, dtype=torch.float64, requires_grad=True) for count in (3, 4))
    part, rows = layer.score.named(), []
    for state in query:
        known = [state @ part["query_weight"][0] + h @ part["key_weight"][0] + part["bias"][0] for h in source]
        scores = torch.stack([torch.tanh(both) @ part["vector"][0] for both in known])
        weights = torch.eye(4).double()[scores.argmax()] if name == "visual_hard" else scores.softmax(0)
        seen = sum(weight * h for weight, h in zip(weights, source, strict=True))
        rows.append(seen if name == "alignment" else torch.sigmoid(layer.inner.gate(state)) * seen)
    ours, theirs = layer(query[None], source[None])[0], torch.stack(rows)
    equation = agrees(name, paper="of the states themselves, in loops")
    equation.outputs(ours, theirs, 1e-12)
    probe = torch.randn_like(ours)
    found, expected = (torch.autograd.grad((made * probe).sum(), (query, source)) for made in (ours, theirs))
    equation.gradients(found, expected, 1e-11)


@pytest.mark.parametrize("name", ["alignment", "visual_soft", "luong", "local_m", "local_p"])
def test_what_it_costs_without_projections_is_what_its_layer_has(build, name):
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, {"projections": "none"}, hidden_size=6)
    held = sum(weight.numel() for weight in mechanism.build(config).parameters())
    cost = mechanism.cost(config, Shape(batch=2, query=3, key=5))
    assert cost.parameters == held
    whole = mechanism.cost(configure(mechanism, None, hidden_size=6), Shape(batch=2, query=3, key=5))
    assert whole.flops - cost.flops == 2 * 2 * 6 * 6 * (2 * 3 + 2 * 5)


@pytest.mark.parametrize("change", [{"num_heads": 2}, {"head_dim": 3}, {"bias": True}])
def test_states_are_not_cut_into_heads_without_projections(change):
    with pytest.raises(InvalidValue, match="projections 'none'"):
        configure(installed().mechanisms.get("alignment"), {"projections": "none"}, hidden_size=6, **change)
