"""BART's relatives and UMT5: transformers' logits in transformers' folders, in float64, whole, stepped and padded."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.loading import load_model, save_model
from attn_testing.memory import stepped_logits
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES = {
    "vocab_size": 31,
    "d_model": 16,
    "max_position_embeddings": 40,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
}
T5 = {
    "vocab_size": 31,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
# Sinusoids are rounded to float32 in transformers, and so are T5's norms.
FAMILIES = {
    "bart": (SIZES, 1e-10),
    "mbart": (SIZES | {"scale_embedding": True}, 1e-10),
    "plbart": (SIZES | {"activation_function": "relu"}, 1e-10),
    "pegasus": (SIZES, 1e-10),
    "blenderbot": (SIZES | {"activation_function": "swish"}, 1e-10),
    "marian": (SIZES | {"activation_function": "swish", "scale_embedding": True}, 1e-6),
    "m2m_100": (SIZES, 1e-5),
    "umt5": (T5, 1e-5),
}
SOURCE = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(20) < torch.tensor([[20], [11], [2]])
TOKENS = torch.randint(3, 31, (3, 15), generator=torch.Generator().manual_seed(2))


def written(family, folder):
    """A folder that transformers writes, of a model in which every weight counts, and the model as it reads it."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family][0])
    peer = transformers.AutoModelForSeq2SeqLM.from_config(config).double()
    with torch.no_grad():
        for name, tensor in peer.state_dict().items():
            if "embed_positions" not in name or family not in ("marian", "m2m_100"):
                tensor.normal_(mean=float("norm" in name and "weight" in name), std=0.2)
    peer.save_pretrained(folder)
    return type(peer).from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers_both_ways(family, tmp_path):
    peer, tolerance = written(family, tmp_path / "theirs"), FAMILIES[family][1]
    ours = load_model(tmp_path / "theirs", "float64").model
    save_model(tmp_path / "ours", ours, layout=family)
    back = type(peer).from_pretrained(tmp_path / "ours", attn_implementation="eager", dtype=torch.float64).eval()
    source = torch.where(KEEP, SOURCE, peer.config.pad_token_id)
    mine = ours(TOKENS, source, KEEP)
    for their in (peer, back):
        theirs = their(source, attention_mask=KEEP.long(), decoder_input_ids=TOKENS).logits
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)
    for row in range(3):
        pieces = stepped_logits(ours, TOKENS[row], [3, 1, 1, 10], SOURCE[row, KEEP[row]])
        torch.testing.assert_close(pieces, theirs[row], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("bart", {"decoder_ffn_dim": 8}, "decoder_ffn_dim"),
        ("bart", {"activation_function": "tanh"}, "activation_function"),
        ("bart", {"num_hidden_layers": 3}, "num_hidden_layers"),
        ("bart", {"scale_embedding": "no"}, "scale_embedding"),
        ("bart", {"max_position_embeddings": 41}, "embed_positions"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings"),
        ("marian", {"decoder_vocab_size": 7}, "decoder_vocab_size"),
        ("m2m_100", {"pad_token_id": 3}, "pad_token_id"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_its_key(family, change, said, tmp_path):
    written(family, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointInvalid, match=said):
        load_model(tmp_path)


def test_an_unembedding_of_its_own_is_refused_and_a_missing_bias_is_none(tmp_path):
    written("bart", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path).model.output_bias is None
    save_file(tensors | {"lm_head.weight": tensors["model.shared.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"lm_head\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("fields", [{"norm_place": "pre"}, {"embedding_norm": False}, {"first_position": 0}], ids=str)
def test_what_bart_has_not_is_not_written_as_bart(fields, tmp_path):
    written("bart", tmp_path)
    model = load_model(tmp_path).model
    other = type(model)(dataclasses.replace(model.config, **fields))
    with pytest.raises(Incompatible, match=next(iter(fields))):
        save_model(tmp_path / "other", other, layout="bart")
