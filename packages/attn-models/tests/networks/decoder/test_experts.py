"""Laws of a mixture of experts: the paper's sum, tokens alone, what is trained, what is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.mixture_of_experts import active_parameters, imbalance, router_aux_loss
from attn_models.loading import load_model, save_model
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig
from attn_testing.checkpoints import require_same_model
from torch import nn

MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "feed_forward": "swiglu", "norm": "rms"}
SHAPES = {
    "mixtral": MIXTURE,
    "switch": MIXTURE | {"routing": "switch", "num_experts_per_tok": 1, "feed_forward": "relu"},
    "every expert": MIXTURE | {"num_experts_per_tok": 5},
    "one expert": MIXTURE | {"num_experts": 1, "num_experts_per_tok": 1, "norm_place": "both"},
    "biases, post-norm": MIXTURE | {"bias": True, "norm_place": "post", "feed_forward": "gelu"},
}


@pytest.fixture(params=SHAPES)
def model(request, tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(**SHAPES[request.param])).double().eval()
    for parameter in model.parameters():  # far from the small initial weights, so that every path counts
        nn.init.normal_(parameter, std=0.5)
    return model


def by_hand(mixture, token):
    """One token through a mixture, in Python's floats but for the experts themselves."""
    scores = [
        sum(w * x for w, x in zip(row, token.tolist(), strict=True)) for row in mixture.router.score.weight.tolist()
    ]
    best = sorted(range(len(scores)), key=lambda expert: -scores[expert])[: mixture.chosen]
    over = best if type(mixture.router).__name__.startswith("Mixtral") else range(len(scores))
    total = sum(math.exp(scores[expert]) for expert in over)
    return sum(math.exp(scores[expert]) / total * mixture.experts[expert](token) for expert in best)


def test_each_token_is_given_the_weighted_sum_of_its_best_experts(model):
    mixture = model.blocks[0].feed_forward
    rows = torch.randn(2, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([by_hand(mixture, token) for token in rows.view(-1, 16)]).view_as(rows)
        torch.testing.assert_close(mixture(rows), expected, rtol=0, atol=1e-12)


def test_steps_of_many_requests_give_what_the_whole_sequences_give(model, stepwise):
    prompts = [torch.randint(31, (length,)).tolist() for length in (11, 5, 9)]
    plan = [[4, 3, 0, 1, 1, 1, 1], [0, 2, 1, 1, 0, 1, 0], [9, 0, 0, 0, 0, 0, 0]]
    for prompt, stepped in zip(prompts, stepwise(model, prompts, plan), strict=True):
        torch.testing.assert_close(stepped, model(torch.tensor([prompt]))[0], rtol=0, atol=1e-10)


def test_a_token_is_served_in_full_however_many_neighbours_want_its_expert(model):
    mixture = model.blocks[0].feed_forward
    token = torch.randn(1, 16, dtype=torch.float64)
    with torch.no_grad():
        alone = mixture(token)
        crowd = mixture(token.expand(300, 16))
    torch.testing.assert_close(crowd, alone.expand(300, 16), rtol=0, atol=1e-12)


def test_a_neighbour_that_is_no_number_stays_in_its_row(model):
    mixture = model.blocks[0].feed_forward
    rows = torch.randn(6, 16, dtype=torch.float64)
    poisoned = rows.clone()
    poisoned[2], poisoned[4, 3] = math.nan, math.inf
    others = [0, 1, 3, 5]
    with torch.no_grad():
        out = mixture(poisoned)
        torch.testing.assert_close(out[others], mixture(rows)[others], rtol=0, atol=1e-12)
    assert out[2].isnan().any()


def test_of_equal_scores_the_first_experts_are_taken(tiny):
    router = Decoder(tiny(**MIXTURE)).blocks[0].feed_forward.router
    nn.init.zeros_(router.score.weight)
    chosen, weights = router(torch.randn(40, 16))
    assert torch.equal(chosen, torch.tensor([0, 1]).expand(40, 2))
    assert torch.equal(weights, torch.full((40, 2), 0.5))


def imbalance_of(affinity, chosen):
    load = torch.bincount(chosen.flatten(), minlength=affinity.shape[-1])
    return imbalance(affinity, load, chosen.shape[-1])


@pytest.mark.parametrize("chosen", [1, 3])
def test_the_imbalance_is_that_of_the_papers_sums(chosen):
    scores = torch.randn(50, 4, dtype=torch.float64)
    best = scores.topk(chosen).indices
    probabilities = [[math.exp(s) / sum(map(math.exp, row)) for s in row] for row in scores.tolist()]
    expected = 0.0
    for expert in range(4):
        fraction = sum(expert in row for row in best.tolist()) / (50 * chosen)
        expected += 4 * fraction * sum(row[expert] for row in probabilities) / 50
    assert imbalance_of(scores.softmax(-1), best).item() == pytest.approx(expected, abs=1e-12)


def test_the_imbalance_is_one_where_tokens_are_spread_evenly_and_the_number_of_experts_where_one_has_all():
    even = torch.eye(4, dtype=torch.float64).repeat(5, 1) * 100
    assert imbalance_of(even.softmax(-1), even.argmax(-1, keepdim=True)).item() == pytest.approx(1.0)
    crowded = even[:1].expand(20, 4)
    assert imbalance_of(crowded.softmax(-1), crowded.argmax(-1, keepdim=True)).item() == pytest.approx(4.0)


def test_training_on_the_balance_alone_spreads_tokens_over_the_experts(tiny):
    torch.manual_seed(1)
    model = Decoder(
        tiny(**MIXTURE | {"num_layers": 1, "num_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 1.0})
    ).train()
    mixture = model.blocks[0].feed_forward
    nn.init.constant_(mixture.router.score.weight[0], 0.2)
    rows = 1 + torch.randn(200, 16)  # nearly all of them begin at the first expert
    optimizer = torch.optim.Adam(mixture.router.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        mixture(rows)
        loss = router_aux_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.0
    assert losses[-1] < 1.3


def test_the_balance_is_kept_in_training_alone_and_given_once(tiny):
    model = Decoder(tiny(**MIXTURE | {"router_aux_loss_coef": 0.01})).train()
    tokens = torch.randint(31, (2, 8))
    model(tokens)
    assert router_aux_loss(model).item() > 0
    assert router_aux_loss(model) == 0.0
    model.eval()(tokens)
    assert router_aux_loss(model) == 0.0
    unbalanced = Decoder(tiny(**MIXTURE)).train()
    unbalanced(tokens)
    assert router_aux_loss(unbalanced) == 0.0


@pytest.mark.parametrize("routing", ["mixtral", "switch"])
def test_the_router_learns_from_the_models_own_loss(routing, tiny):
    model = Decoder(tiny(**MIXTURE | {"routing": routing})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    router = model.blocks[0].feed_forward.router.score.weight
    tokens = torch.randint(31, (2, 8))
    model(tokens).square().sum().backward()
    step = 1e-6
    with torch.no_grad():
        before = model(tokens).square().sum()
        router[1, 3] += step
        slope = (model(tokens).square().sum() - before) / step
    assert slope.abs() > 1e-3
    torch.testing.assert_close(router.grad[1, 3], slope, rtol=1e-3, atol=1e-3)


def test_all_and_active_parameters_are_counted(tiny):
    config = tiny(**MIXTURE)
    one = 3 * 16 * config.inner_width
    dense = sum(parameter.numel() for parameter in Decoder(tiny(feed_forward="swiglu", norm="rms")).parameters())
    model = Decoder(config)
    routers = 2 * 5 * 16
    assert sum(parameter.numel() for parameter in model.parameters()) == dense + 2 * 4 * one + routers
    assert active_parameters(model) == dense + 2 * one + routers
    plain = Decoder(tiny())
    assert active_parameters(plain) == sum(parameter.numel() for parameter in plain.parameters())


def test_a_mixture_survives_its_folder(model, tmp_path):
    save_model(tmp_path, model)
    again = load_model(tmp_path, "float64").model
    tokens = torch.randint(31, (2, 8))
    assert replace(again.config, mechanism=model.config.mechanism) == model.config
    assert again.config.routing == model.config.routing
    require_same_model(again, model, tokens)


def test_packed_experts_say_what_they_said(tiny):
    fields = MIXTURE | {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
    torch.manual_seed(3)
    model = Decoder(tiny(**fields)).eval()
    tokens = torch.randint(31, (2, 16))
    with torch.no_grad():
        before = model(tokens)
        quantize_model(model, "int8")
        assert (model(tokens) - before).norm() < 0.05 * before.norm()
    assert model.blocks[0].parts() is None  # no kernel of whole blocks may take it for one feed-forward


def test_experts_start_as_small_as_a_feed_forward_would(tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(**MIXTURE | {"hidden_size": 128, "num_layers": 8}))
    expert = model.blocks[0].feed_forward.experts[3]
    assert expert.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert expert.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


@pytest.mark.parametrize("chosen", [None, 6, 0])
def test_a_token_cannot_use_more_experts_than_there_are(chosen):
    needed = {"vocab_size": 31, "max_seq_len": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    with pytest.raises(InvalidValue, match="num_experts_per_tok"):
        DecoderConfig.from_plain(needed | {"num_experts": 5, "num_experts_per_tok": chosen})
