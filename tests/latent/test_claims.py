"""What the literature says of shared and latent keys, counted."""

import json

import pytest
import torch
from attn_core import configure, installed, state_bytes
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_schema.decoder import DecoderConfig
from attn_testing.checkpoints import require_same_model


@pytest.mark.parametrize(("shared", "expected"), [(64, 20_971_520_000), (8, 2_621_440_000)])
def test_cl_10_llama_3_70b_remembers_21_gigabytes_of_eight_sequences_and_an_eighth_where_heads_share(shared, expected):
    gqa = installed().mechanisms.get("gqa")
    config = configure(gqa, hidden_size=8192, num_heads=64, num_kv_heads=shared)
    assert 80 * 8 * state_bytes(gqa.state(config), tokens=1000, dtype="bfloat16") == expected


@pytest.mark.parametrize(("name", "shared"), [("mha", 4), ("mqa", 1)])
def test_cl_38_grouped_heads_are_multi_head_with_a_group_each_and_multi_query_with_one(name, shared):
    torch.manual_seed(0)
    layers = []
    for mechanism, heads in (("gqa", shared), (name, None if name == "mha" else 1)):
        found = installed().mechanisms.get(mechanism)
        layers.append(found.build(configure(found, hidden_size=16, num_heads=4, num_kv_heads=heads)).double())
    layers[1].load_state_dict(layers[0].state_dict())
    rows = torch.randn(2, 7, 16, dtype=torch.float64)
    assert torch.equal(layers[0](rows), layers[1](rows))


def test_cl_43_eight_heads_of_a_width_of_512_have_64_elements():
    mha = installed().mechanisms.get("mha")
    heads = configure(mha, hidden_size=512, num_heads=8).head_layout
    assert (heads.key_size, heads.value_size) == (64, 64)


@pytest.mark.parametrize(("rank", "less"), [(31, True), (32, False), (33, False)])
def test_cl_11_a_latent_holds_fewer_weights_below_the_break_even_rank(rank, less):
    # Two factors k(m + n) against mn: break even at mn / (m + n) = 32 for m = n = 64.
    transmla, mha = (installed().mechanisms.get(name) for name in ("transmla", "mha"))
    sizes = {"hidden_size": 64, "num_heads": 4, "head_dim": 8}
    latent = transmla.build(configure(transmla, {"latent": rank}, **sizes))
    full = mha.build(configure(mha, **sizes))
    factors = sum(getattr(latent, name).weight.numel() for name in ("down", "key", "value"))
    assert (factors < full.key.weight.numel() + full.value.weight.numel()) is less


def test_a_model_of_latents_is_loaded_from_its_folder_as_it_was_saved(tmp_path):
    torch.manual_seed(0)
    options = {"latent": 6, "rotary_size": 4, "query_latent": 5}
    plain = {
        "vocab_size": 31,
        "max_seq_len": 32,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "positions": "none",
    }
    model = Decoder(DecoderConfig.from_plain(plain | {"mechanism": "mla", "options": options})).eval()
    save_model(tmp_path / "model", model)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["decoder"]["options"] == options
    tokens = torch.randint(31, (2, 9))
    require_same_model(load_model(tmp_path / "model").model, model, tokens)
