"""Laws of modules that predict later tokens: what they are trained on, what they leave alone, their layout."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_schema.decoder import DecoderConfig, ExpertsConfig
from attn_testing.checkpoints import require_same_model
from torch.nn import functional

DEEPSEEK = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "norm": "rms",
    "feed_forward": "swiglu",
    "positions": "rotary",
    "rope_interleave": True,
    "mechanism": "mla",
    "options": {"latent": 12, "rotary_size": 4, "nope_size": 8, "value_size": 6, "query_latent": 20},
    "routing": "deepseek_v3",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}


def random_decoder(config):
    torch.manual_seed(0)
    model = Decoder(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2)
    return model


@pytest.mark.oracle
def test_the_loss_is_that_of_transformers_on_what_is_written_in_the_layout_of_deepseek_v3(tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    model = random_decoder(tiny(**DEEPSEEK | {"num_nextn_predict_layers": 2, "nextn_predict_loss_weight": 0.5}))
    save_model(tmp_path, model, layout="deepseek_v3")
    peer = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    peer._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]  # theirs knows a model of 61 layers alone
    later = MtpModel.from_pretrained(peer).eval()
    text = torch.randint(61, (2, 12))
    tokens, targets = text[:, :-1], text[:, 1:]
    with torch.no_grad():
        hidden = peer.model(tokens).last_hidden_state
        losses = [functional.cross_entropy(peer.lm_head(hidden).flatten(0, 1), targets.flatten())]
        for depth in (1, 2):
            length = tokens.shape[1] - depth
            places = torch.arange(length).expand(2, length)
            known = text[:, depth : depth + length]
            hidden = later.forward_layer(depth - 1, hidden[:, :length], places, None, input_ids=known)
            wanted = text[:, depth + 1 : depth + 1 + length]
            losses.append(functional.cross_entropy(peer.lm_head(hidden).flatten(0, 1), wanted.flatten()))
        ours = model.training_loss(tokens, targets)
    torch.testing.assert_close(ours, losses[0] + 0.5 * (losses[1] + losses[2]) / 2, rtol=0, atol=1e-5)


def test_without_modules_the_loss_is_that_of_the_next_token(tiny):
    model = random_decoder(tiny())
    text = torch.randint(31, (3, 9))
    plain = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    torch.testing.assert_close(model.training_loss(text[:, :-1], text[:, 1:]), plain)


def test_a_window_too_short_for_later_tokens_trains_on_those_it_has(tiny):
    model = random_decoder(tiny(num_nextn_predict_layers=3))
    text = torch.randint(31, (2, 2))
    plain = functional.cross_entropy(model(text[:, :1]).flatten(0, 1), text[:, 1:].flatten())
    torch.testing.assert_close(model.training_loss(text[:, :1], text[:, 1:]), plain)


def test_modules_change_neither_logits_nor_what_is_remembered(tiny):
    model = random_decoder(tiny(num_nextn_predict_layers=2))
    plain = Decoder(tiny()).eval()
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("predictors.")})
    tokens = torch.randint(31, (2, 9))
    assert torch.equal(model(tokens), plain(tokens))
    assert model.state_specs() == plain.state_specs()


def test_the_token_after_the_next_is_learned_and_the_trunk_learns_from_it(tiny):
    torch.manual_seed(0)
    model = Decoder(tiny(num_nextn_predict_layers=1, nextn_predict_loss_weight=1.0)).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = (torch.arange(25) % 7)[None]
    losses = []
    for _ in range(80):
        loss = model.training_loss(text[:, :-1], text[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 6  # of both tokens
    assert losses[-1] < 1
    hidden = model.hidden(text[:, :-1])
    model.predictors[0](hidden, model.embedding(text[:, 1:])).sum().backward()
    assert model.blocks[0].attention.query.weight.grad.abs().sum() > 0


@pytest.mark.usefixtures("strangers")
def test_modules_survive_the_folder_with_the_tables_that_no_folder_holds(tiny, tmp_path):
    model = random_decoder(tiny(mechanism="running_mean", num_nextn_predict_layers=2))
    save_model(tmp_path, model)
    again = load_model(tmp_path).model
    text = torch.randint(31, (2, 9))
    arguments = text[:, :-1], text[:, 1:]
    require_same_model(again, model, *arguments, call=Decoder.training_loss)


def test_published_weights_are_read_with_the_copies_of_the_embeddings_among_them(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    model = random_decoder(tiny(**DEEPSEEK | {"num_nextn_predict_layers": 1}))
    save_model(tmp_path, model, layout="deepseek_v3")
    (tmp_path / "manifest.json").unlink()
    tensors = load_file(tmp_path / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    tensors |= {"model.layers.2.embed_tokens.weight": copy, "model.layers.2.shared_head.head.weight": copy.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    text = torch.randint(61, (2, 9))
    arguments = text[:, :-1], text[:, 1:]
    again = load_model(tmp_path).model
    require_same_model(again, model, *arguments, call=Decoder.training_loss)
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")}
    save_file(left, tmp_path / "model.safetensors")
    assert load_model(tmp_path).config.num_nextn_predict_layers == 0


@pytest.mark.parametrize("depth", [-1, 32, 1.5, "2"])
def test_a_depth_that_no_sequence_has_is_refused(depth, tiny):
    with pytest.raises(InvalidValue, match="num_nextn_predict_layers"):
        tiny(num_nextn_predict_layers=depth)


@pytest.mark.parametrize("layout", ["llama", "gpt2", "deepseek_v2"])
def test_a_layout_without_words_for_later_tokens_refuses_them(layout, tmp_path):
    from attn_models.adapters.registry import decoder_adapter

    fields = DEEPSEEK | {"max_seq_len": 64, "num_layers": 2, "num_heads": 4, "num_nextn_predict_layers": 1}
    if layout == "llama":
        plain = {"mechanism": "mha", "options": {}, "rope_interleave": False}
        fields = {name: value for name, value in fields.items() if name not in ExpertsConfig.__annotations__} | plain
    if layout == "gpt2":
        fields = {"vocab_size": 61, "max_seq_len": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "bias": True}
        fields |= {"num_nextn_predict_layers": 1}
    with pytest.raises(Incompatible, match="num_nextn_predict_layers"):
        decoder_adapter(layout).to_hf_config(DecoderConfig.from_plain(fields))
