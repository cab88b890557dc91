"""Laws of DeepSeekMoE: shared experts, groups, scores by softmax or sigmoid, and biases that spread tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.mixture_of_experts import active_parameters, router_aux_loss, update_router_biases
from attn_models.loading import load_model, save_model
from attn_models.quantization.quantize import quantize_model
from torch import nn

SMALL = {
    "feed_forward": "swiglu",
    "norm": "rms",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
ROUTINGS = ["deepseek_v2", "deepseek_v3"]


@pytest.fixture(params=ROUTINGS)
def model(request, tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(**SMALL | {"routing": request.param})).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    if request.param == "deepseek_v3":
        nn.init.normal_(model.blocks[1].feed_forward.router.correction, std=0.3)
    return model


def sigmoid(score):
    return 1 / (1 + math.exp(-score))


def by_hand(mixture, token):
    """One token through a mixture of two experts a group, in Python's floats but for the experts themselves."""
    third = hasattr(mixture.router, "correction")
    scores = [
        sum(w * x for w, x in zip(row, token.tolist(), strict=True)) for row in mixture.router.score.weight.tolist()
    ]
    total = sum(map(math.exp, scores))
    parts = [sigmoid(score) if third else math.exp(score) / total for score in scores]
    biases = mixture.router.correction.tolist() if third else [0.0] * len(scores)
    wanted = [part + bias for part, bias in zip(parts, biases, strict=True)]
    of_groups = [(wanted[2 * g] + wanted[2 * g + 1]) if third else max(wanted[2 * g : 2 * g + 2]) for g in range(4)]
    groups = sorted(range(4), key=lambda group: -of_groups[group])[:2]
    inside = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
    best = sorted(inside, key=lambda expert: -wanted[expert])[:3]
    norm = sum(parts[expert] for expert in best) if third else 1.0
    routed = sum(2.5 * parts[expert] / norm * mixture.experts[expert](token) for expert in best)
    return routed + mixture.shared(token)


def test_each_token_is_given_its_best_experts_of_its_best_groups_and_the_shared_ones(model):
    mixture = model.blocks[1].feed_forward
    rows = torch.randn(2, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([by_hand(mixture, token) for token in rows.view(-1, 16)]).view_as(rows)
        torch.testing.assert_close(mixture(rows), expected, rtol=0, atol=1e-12)


def test_the_first_layers_have_one_feed_forward_of_the_full_width(model):
    assert model.blocks[0].feed_forward.up.weight.shape == (model.config.inner_width, 16)
    assert model.blocks[1].feed_forward.experts[0].up.weight.shape == (12, 16)
    assert model.blocks[1].feed_forward.shared.up.weight.shape == (24, 16)


def test_the_best_expert_is_left_out_where_its_group_is_not_chosen(tiny):
    router = Decoder(tiny(**SMALL | {"routing": "deepseek_v3", "num_experts_per_tok": 4})).blocks[1].feed_forward.router
    wanted = torch.tensor([[3.0, -9.0, 2.0, 2.0, -9.0, -9.0, 1.0, 1.0]])
    assert sorted(router.choose(wanted)[0].tolist()) == [2, 3, 6, 7]


def test_a_bias_decides_who_is_chosen_and_not_how_much_it_counts(tiny):
    router = Decoder(tiny(**SMALL | {"routing": "deepseek_v3"})).double().blocks[1].feed_forward.router
    nn.init.normal_(router.score.weight)
    router.correction[5] = 100.0
    rows = torch.randn(20, 16, dtype=torch.float64)
    chosen, weights = router(rows)
    assert (chosen == 5).any(-1).all()
    parts = router.score(rows).sigmoid().gather(-1, chosen)
    torch.testing.assert_close(weights, 2.5 * parts / parts.sum(-1, keepdim=True))


def test_levelling_moves_each_bias_by_one_rate_against_its_load(tiny):
    model = Decoder(
        tiny(**SMALL | {"routing": "deepseek_v3", "router_bias_update_rate": 0.01, "num_experts_per_tok": 2})
    ).train()
    router = model.blocks[1].feed_forward.router
    loads = torch.tensor([[0, 1]] * 6 + [[2, 3]] * 4 + [[4, 5]] * 4 + [[6, 7]] * 2)
    router.note(torch.zeros(16, 8), loads)  # a mean of four tokens an expert
    update_router_biases(model)
    moved = [-0.01, -0.01, 0.0, 0.0, 0.0, 0.0, 0.01, 0.01]
    torch.testing.assert_close(router.correction, torch.tensor(moved))
    update_router_biases(model)  # nothing was routed since
    torch.testing.assert_close(router.correction, torch.tensor(moved))


def test_biases_alone_spread_tokens_over_the_experts_and_leave_the_weights_alone(tiny):
    torch.manual_seed(1)
    fields = {"routing": "deepseek_v3", "router_bias_update_rate": 0.01, "n_group": None, "topk_group": None}
    model = Decoder(tiny(**SMALL | fields | {"num_experts_per_tok": 1})).train()
    mixture = model.blocks[1].feed_forward
    nn.init.normal_(mixture.router.score.weight, std=0.2)
    nn.init.constant_(mixture.router.score.weight[0], 0.2)
    rows = 1 + torch.randn(200, 16)  # nearly all of them begin at the first expert
    before = [parameter.clone() for parameter in model.parameters()]
    shares = []
    for _ in range(150):
        mixture(rows)
        shares.append(mixture.router.load.max().item() / 200)
        update_router_biases(model)
    assert shares[0] > 0.8
    assert shares[-1] < 0.2
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert router_aux_loss(model) == 0.0


def test_what_is_only_asked_counts_for_no_load(tiny):
    model = Decoder(tiny(**SMALL | {"routing": "deepseek_v3", "router_bias_update_rate": 0.01})).eval()
    model(torch.randint(31, (2, 8)))
    assert model.blocks[1].feed_forward.router.load is None


def test_steps_of_many_requests_give_what_the_whole_sequences_give(model, stepwise):
    prompts = [torch.randint(31, (length,)).tolist() for length in (11, 5)]
    plan = [[4, 3, 0, 1, 1, 1, 1], [0, 2, 1, 1, 0, 1, 0]]
    for prompt, stepped in zip(prompts, stepwise(model, prompts, plan), strict=True):
        torch.testing.assert_close(stepped, model(torch.tensor([prompt]))[0], rtol=0, atol=1e-10)


def test_a_token_uses_the_shared_experts_and_its_own(model):
    one, outside = 3 * 12 * 16, sum(parameter.numel() for parameter in model.parameters())
    assert active_parameters(model) == outside - (8 - 3) * one


def test_biases_survive_the_folder_in_float32(model, tmp_path):
    save_model(tmp_path, model.float())
    again = load_model(tmp_path, "bfloat16").model
    assert replace(again.config, mechanism=model.config.mechanism) == model.config
    kept, biases = again.state_dict(), {name: t for name, t in model.state_dict().items() if "correction" in name}
    assert all(torch.equal(kept[name], tensor) and kept[name].dtype == torch.float32 for name, tensor in biases.items())


def test_packed_experts_say_what_they_said(tiny):
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "routing": "deepseek_v3"}
    model = Decoder(tiny(**SMALL | sizes)).eval()
    tokens = torch.randint(31, (2, 16))
    with torch.no_grad():
        before = model(tokens)
        quantize_model(model, "int8")
        assert (model(tokens) - before).norm() < 0.05 * before.norm()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_group": 3}, "n_group: 3"),
        ({"topk_group": 5}, "topk_group: 5"),
        ({"topk_group": 1}, "topk_group: 1"),  # two experts for three choices
        ({"topk_group": None}, "topk_group"),
        ({"n_group": None}, "topk_group: 2"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: 3"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: -1"),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor"),
        ({"n_shared_experts": 0}, "n_shared_experts: 0"),
        ({"routing": "mixtral"}, "routing: 'mixtral'"),
        ({"router_bias_update_rate": 0.1, "routing": "deepseek_v2"}, "router_bias_update_rate"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_experts_that_contradict_themselves_are_refused(change, named, tiny):
    with pytest.raises(InvalidValue, match=named):
        tiny(**SMALL | {"routing": "deepseek_v3"} | change)


def test_a_gate_lets_the_shared_experts_through_as_the_sigmoid_of_the_token_says(tiny):
    torch.manual_seed(0)
    gated = (
        Decoder(tiny(**SMALL | {"routing": "deepseek_v2", "shared_expert_gate": True})).double().blocks[1].feed_forward
    )
    nn.init.normal_(gated.shared_expert_gate.weight)
    rows = torch.randn(7, 16, dtype=torch.float64)
    with torch.no_grad():
        whole = gated(rows)
        factors = [
            sigmoid(sum(w * x for w, x in zip(gated.shared_expert_gate.weight[0], row, strict=True))) for row in rows
        ]
        said = gated.shared(rows)
        gated.shared = None
        expected = gated(rows) + torch.tensor(factors, dtype=torch.float64)[:, None] * said
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)


def test_a_gate_without_shared_experts_is_refused(tiny):
    with pytest.raises(InvalidValue, match="shared_expert_gate"):
        tiny(num_experts=4, num_experts_per_tok=2, shared_expert_gate=True)
    with pytest.raises(InvalidValue, match="num_experts"):
        tiny(shared_expert_gate=True)
