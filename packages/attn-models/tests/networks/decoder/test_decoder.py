"""Laws of the decoder: causality, steps equal the whole, sizes, initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.decoder.decoder import Decoder
from torch import nn

SHAPES = [
    {},
    {"mechanism": "gqa", "num_kv_heads": 2, "norm": "rms", "feed_forward": "swiglu", "positions": "rotary"},
    {"norm_place": "post", "feed_forward": "relu", "bias": True},
    {"positions": "none", "tie_word_embeddings": False, "feed_forward": "gelu_tanh", "head_dim": 6},
    {"mechanism": "running_mean", "options": {"decay": 0.9}},
    {"pattern": ["mha", "running_mean"]},
    {"norm_place": "after", "norm": "rms", "mechanism": "gemma", "options": {"norm_over": "all_heads"}},
    {"norm_place": "parallel", "positions": "rotary", "bias": True, "attention_bias": False},
    {"norm_place": "parallel_shared", "norm_bias": True, "embedding_norm": True, "mechanism": "alibi"},
    {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logit_scale": 0.5, "position_offset": 2},
    {
        "attention_bias": True,
        "attention_output_bias": False,
        "feed_forward": "swiglu_clamped",
        "feed_forward_bias": True,
    },
    {"mechanism": "sink", "options": {"window": 3}, "tie_word_embeddings": False, "unembedding_bias": True},
]
pytestmark = pytest.mark.usefixtures("strangers")


@pytest.fixture(params=SHAPES, ids=lambda fields: "-".join(map(str, fields.values())) or "default")
def model(request, tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(**request.param)).double().eval()
    for parameter in model.parameters():  # far from the small initial weights, so that every path counts
        nn.init.normal_(parameter, std=0.5)
    return model


def test_no_logit_depends_on_a_later_token(model):
    tokens = torch.randint(31, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any()


def test_steps_of_many_requests_give_what_the_whole_sequences_give(model, stepwise):
    lengths = [11, 5, 9]
    prompts = [torch.randint(31, (length,)).tolist() for length in lengths]
    plan = [[4, 3, 0, 1, 1, 1, 1], [0, 2, 1, 1, 0, 1, 0], [9, 0, 0, 0, 0, 0, 0]]
    for prompt, stepped in zip(prompts, stepwise(model, prompts, plan), strict=True):
        torch.testing.assert_close(stepped, model(torch.tensor([prompt]))[0], rtol=0, atol=1e-10)


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers(model):
    with pytest.raises(InvalidValue, match=r"33 tokens.*context of 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_the_unembedding_is_the_embedding_where_tied(tiny):
    tied, free = Decoder(tiny()), Decoder(tiny(tie_word_embeddings=False))
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(tied.logits(hidden), hidden @ tied.embedding.weight.T)
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 31 * 16


def test_gpt2_has_as_many_weights_as_its_formula_says():
    from attn_schema.decoder import DecoderConfig

    layers, width, vocabulary, context = 12, 768, 50257, 1024
    shape = {
        "num_layers": layers,
        "hidden_size": width,
        "vocab_size": vocabulary,
        "max_seq_len": context,
        "num_heads": 12,
    }
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**shape, bias=True))
    counted = sum(parameter.numel() for parameter in model.parameters())
    formula = layers * (12 * width**2 + 13 * width) + vocabulary * width + context * width + 2 * width
    assert counted == formula == 124_439_808


def test_a_source_is_refused(tiny):
    with pytest.raises(Incompatible, match="7 encoder tokens"):
        Decoder(tiny()).encode(torch.zeros(7, dtype=torch.int64))


def test_cl_29_post_norm_leaves_every_token_normalised(tiny):
    model = Decoder(tiny(norm_place="post", num_layers=1)).eval()
    hidden = model.blocks[0](torch.randn(2, 5, 16) * 9)
    torch.testing.assert_close(hidden.mean(-1), torch.zeros(2, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(hidden.var(-1, unbiased=False), torch.ones(2, 5), atol=1e-3, rtol=0)


def test_cl_29_pre_norm_can_be_the_identity(tiny):
    model = Decoder(tiny())
    for block in model.blocks:
        nn.init.zeros_(block.attention.output.weight)
        nn.init.zeros_(block.feed_forward.down.weight)
    hidden = torch.randn(2, 5, 16)
    assert torch.equal(model.blocks[0](hidden), hidden)


def test_initial_weights_have_gpt2s_deviations(tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(hidden_size=256, num_heads=4, num_layers=2, bias=True))
    block = model.blocks[0]
    for weight in (model.embedding.weight, block.feed_forward.up.weight, block.attention.query.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    for weight in (block.attention.output.weight, block.feed_forward.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
    assert not block.feed_forward.up.bias.any()


def test_an_untrained_model_predicts_nearly_uniformly(tiny):
    torch.manual_seed(0)
    model = Decoder(tiny()).eval()
    tokens = torch.randint(31, (8, 32))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(31), abs=0.1)


def test_dropout_acts_in_training_only(tiny):
    model = Decoder(tiny(dropout=0.5))
    tokens = torch.randint(31, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_attention_maps_are_causal_rows_that_sum_to_one(tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(mechanism="gqa", num_kv_heads=2, positions="rotary")).eval()
    maps = model.attention_maps(torch.randint(31, (9,)), [1, 0])
    assert maps.keys() == {0, 1}
    for weights in maps.values():
        assert weights.shape == (4, 9, 9)
        torch.testing.assert_close(weights.sum(-1), torch.ones(4, 9))
        assert not weights.triu(1).any()


def test_attention_maps_name_a_layer_that_does_not_exist_and_a_mechanism_without_weights(tiny):
    tokens = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InvalidValue, match="layers: 2 is not allowed; allowed: 0 to 1"):
        Decoder(tiny()).attention_maps(tokens, [2])
    with pytest.raises(Incompatible, match="'running_mean' returns no attention weights"):
        Decoder(tiny(mechanism="running_mean")).attention_maps(tokens, [0])


def test_a_decoder_learns_to_copy_the_token_before(tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(hidden_size=32, vocab_size=8, max_seq_len=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        tokens = torch.randint(8, (16, 16))
        loss = nn.functional.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
