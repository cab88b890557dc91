"""Keys that a adapter does not read: said where they are unknown, refused where they change what is computed."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from attn_core.errors import CheckpointInvalid, UserError
from attn_models.adapters.hf_config import check_unread_keys, without_aliases
from attn_models.adapters.registry import ADAPTERS, decoder_adapter
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from safetensors.torch import load_file, save_file

LLAMA = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "mechanism": "gqa", "num_kv_heads": 2}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
UNTIED = LLAMA | {"tie_word_embeddings": False}


@pytest.fixture
def change(tiny, tmp_path):
    """A saved Llama, whose config.json is changed; None takes a key away."""

    def to(**values):
        folder = save_model(tmp_path / "model", Decoder(tiny(**UNTIED)), layout="llama")
        (folder / "manifest.json").unlink()
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return to


def test_unknown_keys_are_said_all_together(change, caplog):
    load_model(change(frobnicate=3, another_key={"a": 1}, attention_dropout=0.1, bos_token_id=1))
    said = [record for record in caplog.records if "unknown config keys" in record.getMessage()]
    assert len(said) == 1
    assert said[0].getMessage().endswith(": another_key, frobnicate")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("sliding_window", 4),
        ("attn_logit_softcapping", 50.0),
        ("num_local_experts", 8),
        ("residual_multiplier", 0.22),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("layer_types", 5),
        ("kv_lora_rank", 512),
        ("clip_qkv", 8.0),
        ("is_causal", False),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("original_max_position_embeddings", 16),
    ],
)
def test_a_key_of_another_family_that_changes_what_is_computed_is_refused(change, key, value):
    with pytest.raises(CheckpointInvalid, match=rf"config\.json: {key}: .*allowed: "):
        load_model(change(**{key: value}))


def test_such_a_key_passes_where_it_says_that_nothing_changes(change, caplog):
    load_model(change(sliding_window=None, residual_multiplier=1.0, layer_types=["full_attention"] * 2))
    assert not caplog.records


@pytest.mark.parametrize("said", [{"rope_parameters": None, "partial_rotary_factor": 0.5}, {"rope_parameters": HALF}])
def test_a_part_of_a_head_is_not_rotated_where_the_family_rotates_whole_heads(change, said):
    with pytest.raises(CheckpointInvalid, match=r"partial_rotary_factor: 0\.5 is not allowed; allowed: 1 or None"):
        load_model(change(**said))


def renamed(folder, change):
    """The folder with its tensors under other names, or without those that become None."""
    path = folder / "model.safetensors"
    named = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in named.items() if name is not None}, path)
    return folder


def test_an_unembedding_that_is_said_to_be_tied_and_is_another_is_kept(change, caplog):
    """As transformers 5 keeps both."""
    tokens = torch.arange(12).view(1, 12)
    folder = change()
    expected = load_model(folder).model(tokens)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_model(folder).model
    torch.testing.assert_close(model(tokens), expected)
    assert not model.config.tie_word_embeddings
    assert "another tensor: kept" in caplog.text


def test_a_tied_checkpoint_may_have_the_unembedding_alone_and_no_prefix(change):
    names = {"lm_head.weight": None, "model.embed_tokens.weight": "lm_head.weight"}
    folder = renamed(change(tie_word_embeddings=True), lambda name: names.get(name, name))
    tokens = torch.arange(12).view(1, 12)
    expected = load_model(folder).model(tokens)
    bare = renamed(folder, lambda name: "embed_tokens.weight" if name == "lm_head.weight" else name[len("model.") :])
    torch.testing.assert_close(load_model(bare).model(tokens), expected)


def test_a_head_with_a_bias_has_no_prefix_either():
    names = ["wte.weight", "lm_head.weight", "lm_head.bias"]
    found = decoder_adapter("gptj").canonical_names(names)
    assert found == {"transformer.wte.weight": names[0], names[1]: names[1], names[2]: names[2]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "key_value"),
        ({"num_attention_heads": 8}, "tensor"),
        ({"num_key_value_heads": 4}, "k_proj.weight' has shape"),
        ({"head_dim": 8}, "q_proj.weight' has shape"),
        ({"intermediate_size": 40}, "mlp.up_proj.weight' has shape"),
        ({"intermediate_size": 56}, "intermediate_size: 56"),
        ({"num_hidden_layers": 3}, "layers.2.* is missing"),
        ({"vocab_size": 30}, "embed_tokens.weight' has shape"),
        ({"hidden_size": 18, "head_dim": None}, "num_attention_heads"),
    ],
)
def test_sizes_that_contradict_each_other_or_the_tensors_are_refused(change, changes, named):
    with pytest.raises(UserError, match=named):
        load_model(change(**changes))


@pytest.mark.oracle
@pytest.mark.parametrize("layout", sorted(set(ADAPTERS) - {"attn_decoder"}))
def test_everything_that_transformers_writes_is_understood(layout, tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(layout)
    written = json.loads(config.to_json_string(use_diff=False))
    with caplog.at_level(logging.WARNING, "attn_models"):
        adapter = decoder_adapter(layout)
        check_unread_keys(without_aliases(written, adapter.aliases), adapter.known_keys, tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("attn_models")]


@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["mistral", "mixtral"])
def test_a_missing_key_means_what_it_means_to_transformers(layout):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(layout)
    needed = ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers")
    values = {key: getattr(theirs, key) for key in (*needed, "num_attention_heads")}
    ours = decoder_adapter(layout).from_hf_config(values)
    assert ours.num_kv_heads == theirs.num_key_value_heads == 8
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.options.get("window") == theirs.sliding_window


@pytest.mark.oracle
def test_gemma_in_16_bits_keeps_gains_that_16_bits_cannot_hold(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=1, sliding_window=5)
    torch.manual_seed(0)
    peer = transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(std=0.003 if "norm" in name else 0.2)  # one and so little is one in bfloat16
    peer = peer.to(torch.bfloat16)
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path, "bfloat16").model
    norm, theirs = model.blocks[1].feed_forward_norm, peer.model.layers[1].pre_feedforward_layernorm
    assert torch.equal(norm.weight, 1 + theirs.weight.float())
    assert (norm.weight.bfloat16() == 1).float().mean() > 0.5
    rows = torch.randn(64, 32).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(norm(rows), theirs(rows), rtol=2**-8, atol=0)
        rounded = torch.nn.functional.rms_norm(rows.float(), (32,), norm.weight.bfloat16().float(), norm.eps).bfloat16()
        assert (norm(rows) != theirs(rows)).float().mean() < 0.2 * (rounded != theirs(rows)).float().mean()
        tokens = torch.randint(31, (1, 9))
        assert model(tokens).dtype == torch.bfloat16
