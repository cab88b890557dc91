"""Decoders of papers: GPT-3's bands, the Sparse Transformer's patterns, RetNet."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName
from attn_models.attention import layer_attentions
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from attn_testing.checkpoints import require_same_model
from torch import nn

SIZES = {"vocab_size": 31, "max_seq_len": 40, "hidden_size": 16, "num_layers": 4, "num_heads": 2}
CASES = [
    ("gpt3", {"band": 5}),
    ("sparse_transformer", {"stride": 6, "summaries": 2}),
    ("sparse_transformer", {"stride": 6, "kind": "strided"}),
    ("retnet_lm", {}),
    ("retnet_lm", {"scale_base": 512}),
]
EVERY = pytest.mark.parametrize(("name", "fields"), CASES, ids=str)


def configured(name, **fields):
    return installed().models.get(name).configure(SIZES | fields)


def drawn(name, fields):
    torch.manual_seed(0)
    model = Decoder(configured(name, **fields)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


@EVERY
def test_steps_of_any_size_give_the_logits_of_the_whole(name, fields, stepwise):
    model = drawn(name, fields)
    prompts = [torch.randint(31, (length,)).tolist() for length in (23, 17)]
    found = stepwise(model, prompts, [[9, 1, 1, 12], [1, 15, 0, 1]])
    close = 1e-5 if name == "retnet_lm" else 1e-10  # retention is remembered in float32
    for prompt, logits in zip(prompts, found, strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([prompt]))[0], rtol=0, atol=close)


@EVERY
def test_a_saved_one_comes_back_as_a_decoder(name, fields, tmp_path):
    model = drawn(name, fields).float()
    save_model(tmp_path / "model", model, character_tokenizer("abcdefghijklmnopqrstuvwxyz .,;:"))
    loaded = load_model(tmp_path / "model")
    tokens = torch.randint(31, (2, 20))
    require_same_model(loaded.model, model, tokens)
    assert loaded.mechanisms == tuple(model.config.choice(layer).mechanism for layer in range(4))


@pytest.mark.parametrize("kind", ["strided", "fixed"])
def test_two_layers_of_a_sparse_transformer_reach_every_earlier_token(kind):
    config = configured("sparse_transformer", kind=kind, stride=6, summaries=1)
    near, far = (one.mechanism.spec(one.config).mask for one in layer_attentions(config)[:2])
    for query in range(36):
        middle = {key for key in range(36) if far.allows(query, key)} | {query}
        reached = {key for place in middle for key in range(36) if near.allows(place, key)}
        assert reached == set(range(query + 1))
        assert sum(near.allows(query, key) for key in range(36)) <= 7


def test_every_other_layer_of_gpt_3_sees_a_band_with_its_own_token():
    dense, banded = layer_attentions(configured("gpt3", band=5))[:2]
    specs = [one.mechanism.spec(one.config) for one in (dense, banded)]
    assert [[key for key in range(9) if spec.mask.allows(7, key)] for spec in specs] == [
        list(range(8)),
        [3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("name", "fields", "error", "said"),
    [
        ("gpt3", {"band": 0}, InvalidValue, "window: 0"),
        ("gpt3", {"mechanism": "gqa"}, InvalidValue, "mechanism.*gpt3 has its own"),
        ("gpt3", {"stride": 3}, UnknownName, "stride"),
        ("sparse_transformer", {"kind": "both"}, InvalidValue, "kind: 'both'"),
        ("sparse_transformer", {"stride": 4, "summaries": 5}, InvalidValue, "summaries"),
        ("retnet_lm", {"pattern": ["mha"]}, InvalidValue, "pattern"),
        ("retnet_lm", {"scale_base": -1}, InvalidValue, "scale_base"),
        ("retnet_lm", {"num_heads": 3}, InvalidValue, "num_heads"),
        ("retnet_lm", {"hidden_size": "wide"}, InvalidValue, "hidden_size"),
    ],
)
def test_what_a_paper_does_not_have_is_refused_by_its_field(name, fields, error, said):
    with pytest.raises(error, match=said):
        configured(name, **fields)


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_alternating_bands_are_those_of_gpt_neo(dtype, tolerance):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoConfig(
        vocab_size=31,
        hidden_size=16,
        num_layers=4,
        num_heads=2,
        attention_types=[[["global", "local"], 2]],
        window_size=5,
        max_position_embeddings=40,
        intermediate_size=64,
    )
    model = drawn("gpt3", {"band": 5}).to(getattr(torch, dtype))
    peer = transformers.GPTNeoForCausalLM(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for block, theirs in zip(model.blocks, peer.transformer.h, strict=True):
            attention, own = theirs.attn.attention, block.attention
            # Theirs does not divide scores by the root of a head's size, and has biases at the output only.
            own.query.weight.copy_(attention.q_proj.weight * 8**0.5)
            own.key.weight.copy_(attention.k_proj.weight)
            own.value.weight.copy_(attention.v_proj.weight)
            for linear in (own.query, own.key, own.value):
                linear.bias.zero_()
            pairs = [
                (own.output, attention.out_proj),
                (block.attention_norm, theirs.ln_1),
                (block.feed_forward_norm, theirs.ln_2),
                (block.feed_forward.up, theirs.mlp.c_fc),
                (block.feed_forward.down, theirs.mlp.c_proj),
            ]
            for mine, their in pairs:
                mine.load_state_dict(their.state_dict())
        for mine, their in ((model.embedding, peer.transformer.wte), (model.norm, peer.transformer.ln_f)):
            mine.load_state_dict(their.state_dict())
        model.positions.weight.copy_(peer.transformer.wpe.weight)
        tokens = torch.randint(31, (3, 20))
        torch.testing.assert_close(model(tokens), peer(tokens).logits, rtol=0, atol=tolerance)
