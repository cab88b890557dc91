"""T5: transformers' logits in transformers' folders, whole, stepped and padded, and what a folder cannot say."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.encoder_decoder.config import T5Config
from attn_models.encoder_decoder.t5 import T5
from attn_models.loading import load_model, save_model
from attn_testing.checkpoints import require_same_parameters
from attn_testing.memory import stepped_logits
from safetensors.torch import load_file, save_file

SIZES = {"vocab_size": 23, "hidden_size": 16, "num_layers": 2, "num_heads": 3, "head_dim": 4, "intermediate_size": 24}
OPTIONS = {"buckets": 8, "max_distance": 20}
CONFIG = T5Config(
    **SIZES,
    max_seq_len=40,
    max_encoder_len=40,
    num_decoder_layers=3,
    encoder_options=OPTIONS,
    decoder_options=OPTIONS,
)
SOURCE = torch.randint(2, 23, (3, 30), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(30) < torch.tensor([[30], [11], [2]])
TOKENS = torch.randint(2, 23, (3, 25), generator=torch.Generator().manual_seed(2))


def drawn(**fields) -> T5:
    torch.manual_seed(0)
    model = T5(T5Config(**vars(CONFIG) | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.3)
    return model


@pytest.mark.parametrize("fields", [{}, {"feed_forward": "geglu_tanh", "tie_word_embeddings": False}])
@torch.no_grad()
def test_a_folder_of_transformers_comes_back_packed_or_not(fields, tmp_path):
    model = drawn(**fields)
    folder = save_model(tmp_path / "t5", model, layout="t5")
    loaded = load_model(folder).model
    require_same_parameters(loaded, model)
    assert loaded.config == model.config
    expected = model(TOKENS, SOURCE, KEEP)
    torch.testing.assert_close(loaded(TOKENS, SOURCE, KEEP), expected)
    packed = load_model(folder, quantization="int8").model
    likeliest = packed(TOKENS, SOURCE, KEEP).argmax(-1) == expected.argmax(-1)
    assert likeliest.float().mean() > 0.9
    torch.testing.assert_close(stepped_logits(loaded, TOKENS[0], [4, 1, 20], SOURCE[0]), expected[0], rtol=0, atol=1e-4)


def test_biases_of_the_first_block_are_those_of_all_and_are_kept_once():
    model = drawn()
    names = [name for name, _ in model.named_parameters() if "t5_bias" in name]
    assert names == [f"{stack}.0.attention.modifiers.t5_bias.table" for stack in ("encoder", "decoder")]
    before = model.decoder[2].attention(torch.ones(1, 5, 16))
    with torch.no_grad():
        model.decoder[0].attention.modifiers["t5_bias"].table.normal_(std=3.0)
    rows = torch.randn(1, 5, 16)
    assert not torch.equal(model.decoder[2].attention(rows), before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn"),
        ({"is_decoder": True}, "is_decoder"),
        ({"d_kv": None}, "d_kv"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"num_decoder_layers": 4}, r"decoder\.block\.3"),
        ({"num_decoder_layers": 9999}, "num_decoder_layers: 9999"),
        ({"relative_attention_num_buckets": 7}, "buckets"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_its_key(change, said, tmp_path):
    folder = save_model(tmp_path / "t5", drawn(), layout="t5")
    (folder / "manifest.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointInvalid, match=said):
        load_model(folder)


def test_embeddings_of_several_names_must_be_one(tmp_path):
    folder = save_model(tmp_path / "t5", drawn(), layout="t5")
    (folder / "manifest.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    names = {"encoder.embed_tokens.weight": tensors["shared.weight"].clone()}
    save_file(tensors | names, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder)
    alone = {name: tensor for name, tensor in tensors.items() if name != "shared.weight"} | names
    save_file(alone, folder / "model.safetensors", metadata={"format": "pt"})
    require_same_parameters(load_model(folder).model, drawn())
    names["encoder.embed_tokens.weight"][3] += 1
    save_file(tensors | names, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointInvalid, match=r"encoder\.embed_tokens\.weight.*differs"):
        load_model(folder)


def test_other_mechanisms_are_not_written_as_t5(tmp_path):
    with pytest.raises(Incompatible, match="other mechanisms"):
        save_model(tmp_path / "t5", drawn(cross="alignment"), layout="t5")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["t5", "t5-v1.1", "mt5", "t5-own-head"])
def test_logits_are_those_of_transformers_both_ways(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    family = kind[: kind.index("t5") + 2]
    fields = {"t5": {}, "mt5": {}, "t5-own-head": {}, "t5-v1.1": {"tie_word_embeddings": False}}[kind]
    gated = {} if kind == "t5" else {"feed_forward_proj": "gated-gelu"}
    sizes = {"vocab_size": 23, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    config = transformers.AutoConfig.for_model(family, **sizes, **buckets, num_heads=4, **fields, **gated)
    torch.manual_seed(0)
    peer = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    if kind == "t5-own-head":
        peer.lm_head.weight = torch.nn.Parameter(torch.randn_like(peer.lm_head.weight))
        peer.config.tie_word_embeddings = False
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2)
    peer.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs").model
    assert ours.config.tie_word_embeddings == (kind != "t5-own-head")
    save_model(tmp_path / "ours", ours, layout=family)
    back = type(peer).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        mine = ours(TOKENS, SOURCE, KEEP)
        for their in (peer, back):
            theirs = their(SOURCE, attention_mask=KEEP.long(), decoder_input_ids=TOKENS).logits
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        for row in range(3):
            pieces = stepped_logits(ours, TOKENS[row], [3, 1, 1, 20], SOURCE[row, KEEP[row]])
            torch.testing.assert_close(pieces, theirs[row], rtol=1e-5, atol=1e-5)
