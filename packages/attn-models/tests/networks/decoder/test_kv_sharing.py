"""Layers that attend to the keys and values of other layers."""

import math

import pytest
import torch
from attn_core import state_bytes
from attn_core.errors import Incompatible, InvalidValue
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_schema.decoder import DecoderConfig
from attn_testing.checkpoints import require_same_model
from torch import nn

FORMS = {
    "cla": {"num_layers": 4, "kv_sharing": "cla:2"},
    "grouped": {"num_layers": 3, "kv_sharing": [0, 1, 0], "mechanism": "gqa", "num_kv_heads": 2, "positions": "rotary"},
    "yoco": {
        "num_layers": 4,
        "kv_sharing": "yoco",
        "pattern": [{"mechanism": "sliding_window", "options": {"window": 2}}] * 2 + ["mha"] * 2,
    },
    "windows": {"num_layers": 2, "kv_sharing": "cla:2", "mechanism": "sliding_window", "options": {"window": 3}},
    "normed": {"num_layers": 2, "kv_sharing": "cla:2", "mechanism": "qk_norm"},
}


def build(tiny, **fields):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_plain({**tiny(norm="rms").plain(), **fields})).double().eval()
    for parameter in model.parameters():  # far from the small initial weights, so that every path counts
        nn.init.normal_(parameter, std=0.5)
    return model


def normed(rows, norm):
    return rows / (rows.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def by_loops(model, tokens, kv_sharing, windows):
    """Logits of tokens [tokens] of a multi-head decoder with learned positions, head by head and query by query."""
    hidden = model.embedding.weight[tokens] + model.positions.weight[: len(tokens)]
    heads = model.config.num_heads
    lent = {}
    for layer, block in enumerate(model.blocks):
        entering = normed(hidden, block.attention_norm)
        if kv_sharing[layer] == layer:
            lent[layer] = entering @ block.attention.key.weight.T, entering @ block.attention.value.weight.T
        keys, values = lent[kv_sharing[layer]]
        queries = entering @ block.attention.query.weight.T
        size = queries.shape[1] // heads
        attended = torch.zeros_like(queries)
        for token in range(len(tokens)):
            first = 0 if windows[layer] is None else max(0, token - windows[layer])
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = [queries[token, part] @ keys[j, part] / math.sqrt(size) for j in range(first, token + 1)]
                shares = torch.stack(scores).softmax(0)
                attended[token, part] = sum(w * values[first + j, part] for j, w in enumerate(shares))
        hidden = hidden + attended @ block.attention.output.weight.T
        hidden = hidden + block.feed_forward(normed(hidden, block.feed_forward_norm))
    return normed(hidden, model.norm) @ model.embedding.weight.T


@pytest.mark.parametrize(
    ("form", "kv_sharing", "windows"), [("cla", [0, 0, 2, 2], [None] * 4), ("yoco", [0, 1, 2, 2], [1, 1, None, None])]
)
def test_it_equals_loops_over_layers_heads_and_queries(tiny, form, kv_sharing, windows):
    model, tokens = build(tiny, **FORMS[form]), torch.randint(31, (9,))
    expected = by_loops(model, tokens, kv_sharing, windows)
    assert torch.allclose(model(tokens[None])[0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_many_requests_give_what_the_whole_sequences_give(tiny, stepwise, form):
    model = build(tiny, **FORMS[form])
    prompts = [torch.randint(31, (length,)).tolist() for length in (11, 5, 9)]
    plan = [[4, 3, 0, 1, 1, 1, 1], [0, 2, 1, 1, 0, 1, 0], [9, 0, 0, 0, 0, 0, 0]]
    for prompt, stepped in zip(prompts, stepwise(model, prompts, plan), strict=True):
        torch.testing.assert_close(stepped, model(torch.tensor([prompt]))[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kv_sharing", ["cla:1", [0, 1, 2], []])
def test_layers_that_all_have_their_own_are_the_ordinary_decoder(tiny, kv_sharing):
    ordinary, model = build(tiny, num_layers=3), build(tiny, num_layers=3, kv_sharing=kv_sharing)
    model.load_state_dict(ordinary.state_dict())
    tokens = torch.randint(31, (2, 8))
    assert torch.equal(model(tokens), ordinary(tokens))
    assert model.state_specs() == ordinary.state_specs()


def test_layers_with_equal_keys_and_values_may_borrow_them(tiny):
    """Where every input of the upper layer is that of the lower one, sharing changes nothing."""
    ordinary, model = build(tiny, num_layers=2), build(tiny, num_layers=2, kv_sharing="cla:2")
    with torch.no_grad():
        for block in ordinary.blocks:
            block.attention.output.weight.zero_()
            block.feed_forward.down.weight.zero_()
        upper, lower = ordinary.blocks[1], ordinary.blocks[0]
        upper.load_state_dict(lower.state_dict() | {"attention.query.weight": upper.attention.query.weight})
        upper.attention.output.weight.normal_()
    weights = ordinary.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    tokens = torch.randint(31, (2, 8))
    assert torch.allclose(model(tokens), ordinary(tokens), rtol=0, atol=1e-12)
    maps = [one.attention_maps(tokens[0], [0, 1]) for one in (model, ordinary)]
    assert all(torch.allclose(maps[0][layer], maps[1][layer], rtol=0, atol=1e-12) for layer in (0, 1))


def test_what_is_shared_is_remembered_once(tiny):
    def weigh(**fields):
        specs = build(tiny, **fields).state_specs()
        return sum(state_bytes(states, tokens=12, dtype="float32") for states in specs.values())

    one_layer = weigh(num_layers=1)
    assert weigh(num_layers=6, kv_sharing="cla:2") == 3 * one_layer
    assert weigh(num_layers=6, kv_sharing="cla:3") == 2 * one_layer
    # Windows of 2 remember 2 rows of 12; the upper half remembers 12 once.
    windows = [{"mechanism": "sliding_window", "options": {"window": 2}}] * 3 + ["mha"] * 3
    assert weigh(num_layers=6, kv_sharing="yoco", pattern=windows) == one_layer + 3 * (one_layer * 2 // 12)


def test_all_weights_learn_and_the_lender_from_all_its_borrowers(tiny):
    model = build(tiny, num_layers=3, kv_sharing="cla:3").train()
    tokens = torch.randint(31, (2, 9))
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert [name for name, _ in model.named_parameters() if ".key." in name] == ["blocks.0.attention.key.weight"]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_saved_and_loaded_by_our_own_layout_and_refused_by_others(tiny, tmp_path, form):
    model = build(tiny, **FORMS[form]).float()
    again = load_model(save_model(tmp_path / "model", model)).model
    tokens = torch.randint(31, (1, 7))
    require_same_model(again, model, tokens)
    with pytest.raises(Incompatible, match="kv_sharing"):
        save_model(tmp_path / "other", model, layout="llama")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"kv_sharing": "cla:2", "mechanism": "linear"},
            Incompatible,
            "'linear' cannot attend to the keys and values of",
        ),
        ({"kv_sharing": "cla:2", "pattern": ["linear", "mha"]}, Incompatible, "layer 1, 'mha', .* layer 0, 'linear'"),
        (
            {"kv_sharing": "cla:2", "pattern": [{"mechanism": "sliding_window", "options": {"window": 2}}, "mha"]},
            Incompatible,
            "which keeps 2 tokens: layer 1 attends to all tokens",
        ),
        ({"kv_sharing": "cla:2", "pattern": ["mha", "mqa"]}, Incompatible, "differ in shape"),
        ({"kv_sharing": "cla:2", "pattern": ["rope", "mha"]}, Incompatible, "rotary positions differ"),
        ({"kv_sharing": [0, 1]}, InvalidValue, "4 entries"),
        ({"kv_sharing": {"0": 1}}, InvalidValue, "'cla:N', 'yoco'"),
    ],
)
def test_a_loan_that_would_not_fit_is_refused_with_the_reason(tiny, fields, error, message):
    with pytest.raises(error, match=message):
        build(tiny, num_layers=4, **fields)


def test_numbers_of_layers_may_be_whole_floats_as_other_programs_write_them(tiny):
    config = DecoderConfig.from_plain({**tiny().plain(), "num_layers": 2.0, "kv_sharing": [0.0, 0.0]})
    assert [config.source_layer(layer) for layer in range(2)] == [0, 0]


def test_a_stack_of_absurd_height_is_refused_before_it_is_described(tiny):
    with pytest.raises(InvalidValue) as caught:
        DecoderConfig.from_plain({**tiny().plain(), "num_layers": 10**15, "kv_sharing": "yoco"})
    assert caught.value.metadata["field"] == "num_layers"
