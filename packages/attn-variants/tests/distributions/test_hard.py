"""Hard attention, and REINFORCE, which trains it."""

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import InvalidValue
from attn_core.reinforce import MovingBaseline, SampledKeys, reinforce_loss
from attn_variants.reinforce import sample_keys

KEYS = 4
DRAWS = 40000


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_all_weight_is_on_the_largest_score(build):
    hard, mha = build("hard", hidden_size=16, num_heads=4), build("mha", hidden_size=16, num_heads=4)
    mha.load_state_dict(hard.state_dict())
    rows = doubles(2, 7, 16)
    weights = hard.weights(rows)
    assert torch.equal(weights.amax(-1), torch.ones(2, 4, 7, dtype=torch.float64))
    assert torch.equal(weights.argmax(-1), mha.weights(rows).argmax(-1))


def test_sharp_softmax_is_hard_attention(build, agrees):
    hard, mha = build("hard", hidden_size=16, num_heads=2), build("mha", hidden_size=16, num_heads=2)
    state = hard.state_dict()
    mha.load_state_dict({**state, "query.weight": 1e5 * state["query.weight"]})
    rows = doubles(1, 6, 16)
    agrees("hard", identity="mha with queries 100,000 times as long").outputs(hard(rows), mha(rows), 1e-12)


def gradients(baseline, scores, rewards):
    """The REINFORCE gradient of each of many draws, [draw, key]."""
    repeated = scores.expand(DRAWS, 1, 1, KEYS).clone().requires_grad_()
    weights, draw = sample_keys(torch.softmax(repeated, -1))
    reward = (weights.detach() * rewards).sum((1, 2, 3))
    loss = reinforce_loss([draw], reward, baseline, entropy_weight=0.0)
    return -torch.autograd.grad(loss, repeated)[0][:, 0, 0] * DRAWS


def test_the_estimate_is_unbiased_and_a_baseline_lowers_its_variance():
    scores = doubles(KEYS).requires_grad_()
    rewards = torch.tensor([5.0, 6.0, 7.0, 4.0], dtype=torch.float64)
    expected_reward = (torch.softmax(scores, -1) * rewards).sum()
    (exact,) = torch.autograd.grad(expected_reward, scores)
    spread = {}
    for baseline in (0.0, expected_reward.item()):
        found = gradients(baseline, scores.detach(), rewards)
        error = (found.mean(0) - exact).abs()
        assert (error < 5 * found.std(0) / DRAWS**0.5).all()
        spread[baseline] = found.var(0).sum()
    assert spread[expected_reward.item()] < 0.1 * spread[0.0]


def test_queries_and_keys_learn_to_look_where_the_reward_is(build):
    layer = build("sampled", {"expected": 0.0}, hidden_size=8, num_heads=1, causal=False)
    rows = doubles(1, 5, 8).expand(64, 5, 8)
    optimiser, baseline = torch.optim.Adam([layer.query.weight, layer.key.weight], lr=0.05), MovingBaseline()
    layer.train()
    target = layer.value(rows)[:, 3].detach()
    for _ in range(150):
        out = layer(rows)
        reward = -(out - layer.output(target)[:, None]).detach().square().sum((1, 2))
        loss = reinforce_loss([layer.inner.samples], reward, baseline.update(reward))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert torch.equal(layer.eval().weights(rows[:1])[0, 0].argmax(-1), torch.full((5,), 3))


def test_masked_keys_are_never_drawn(build):
    layer = build("sampled", {"expected": 0.0}, hidden_size=8, num_heads=2, causal=False).train()
    key_padding_mask = torch.tensor([[True, False, True, False, True], [False] * 5])
    rows = doubles(2, 5, 8).requires_grad_()
    for _ in range(20):
        out = layer(rows, key_padding_mask=key_padding_mask)
        assert torch.equal(out[1], torch.zeros(5, 8, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(out.sum() + layer.inner.samples.log_probability.sum(), rows)
        assert torch.isfinite(gradient).all()
        assert torch.equal(gradient[1], torch.zeros(5, 8, dtype=torch.float64))
    shares = torch.softmax(doubles(1, 1, 500, 5).masked_fill(~key_padding_mask[0], float("-inf")), -1)
    assert sample_keys(shares)[0][..., ~key_padding_mask[0]].sum() == 0


def test_the_expectation_taken_in_training_is_softmax_attention(build, agrees):
    layer, mha = (
        build("sampled", {"expected": 1.0}, hidden_size=16, num_heads=2),
        build("mha", hidden_size=16, num_heads=2),
    )
    mha.load_state_dict(layer.state_dict())
    same = agrees("sampled", identity="its expectation is mha")
    same.functions(layer.train(), mha, doubles(1, 6, 16), tolerance=1e-12)
    assert layer.inner.samples is None


@pytest.mark.parametrize("expected", [-0.1, 1.5])
def test_a_share_that_is_no_probability_is_refused(expected):
    with pytest.raises(InvalidValue, match="expected"):
        configure(installed().mechanisms.get("sampled"), {"expected": expected}, hidden_size=8)


def test_the_mean_over_every_draw_is_the_gradient_of_the_expected_reward(agrees):
    scores, rewards = doubles(KEYS).requires_grad_(), torch.tensor([5.0, 6.0, 7.0, 4.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((scores.softmax(-1) * rewards).sum(), scores)
    mean = torch.zeros(KEYS, dtype=torch.float64)
    for place in range(KEYS):
        chance = scores.softmax(-1)[place]
        draw = SampledKeys(chance.log().view(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.float64))
        loss = reinforce_loss([draw], rewards[place].view(1), baseline=5.5)
        mean -= chance.detach() * torch.autograd.grad(loss, scores)[0]
    agrees("sampled", paper="REINFORCE over every possible draw").gradients([mean], [exact], 1e-14)


def test_out_of_training_it_is_hard_attention(build, agrees):
    sampled, hard = build("sampled", hidden_size=16, num_heads=4).eval(), build("hard", hidden_size=16, num_heads=4)
    hard.load_state_dict(sampled.state_dict())
    rows = doubles(2, 6, 16)
    agrees("sampled", identity="out of training it is hard").functions(sampled, hard, rows, tolerance=1e-13)
    query, key, value = (linear(rows).unflatten(-1, (4, 4)) for linear in (sampled.query, sampled.key, sampled.value))
    best = [
        [[int((key[b, : i + 1, h] @ query[b, i, h]).argmax()) for h in range(4)] for i in range(6)] for b in range(2)
    ]
    read = torch.stack([torch.stack([value[b, best[b][i], range(4)] for i in range(6)]) for b in range(2)])
    agrees("sampled", paper="the key of the largest score").outputs(
        sampled(rows), sampled.output(read.flatten(-2)), 1e-13
    )
