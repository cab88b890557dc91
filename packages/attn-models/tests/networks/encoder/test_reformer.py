"""Reformers: transformers' rows in transformers' folders, both ways, and what a folder cannot say."""

from __future__ import annotations

import json
from functools import partialmethod

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_models.encoder.config import ReformerConfig
from attn_models.encoder.encoder import Reformer
from attn_models.loading.encoders import save_encoder
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import AttentionChoice
from safetensors.torch import load_file

TOKENIZER = character_tokenizer("abcdefghij")
HASHED = {"buckets": 4, "chunk": 8, "rounds": 2, "within": "chunks", "duplicates": "counted", "ring": "rounds"}
LSH, LOCAL = (
    AttentionChoice(mechanism="lsh", options=HASHED),
    AttentionChoice(mechanism="chunk_ring", options={"chunk": 8}),
)
SIZES = {
    "vocab_size": 10,
    "max_seq_len": 48,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 24,
    "head_dim": 4,
}
THEIRS = {
    "vocab_size": 10,
    "hidden_size": 16,
    "attention_head_size": 4,
    "num_attention_heads": 2,
    "feed_forward_size": 24,
    "max_position_embeddings": 48,
    "num_buckets": 4,
    "num_hashes": 2,
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "axial_pos_shape": [6, 8],
    "axial_pos_embds_dim": [4, 12],
}
KEEPS = {
    "whole": torch.ones(3, 48, dtype=torch.bool),
    "right": torch.arange(45) < torch.tensor([[45], [37], [6]]),
    # All padding is shorter than a chunk: to theirs a chunk of padding is one before the first, ours pass it over.
    "left": torch.arange(45) >= torch.tensor([[0], [3], [4]]),
}


def drawn(**fields) -> Reformer:
    torch.manual_seed(0)
    plain = {"pattern": (LOCAL, LSH), "feed_forward": "relu"}
    model = Reformer(ReformerConfig(**SIZES | plain | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def seeded(choice, seed):
    return AttentionChoice(mechanism=choice.mechanism, options={**choice.options, "seed": seed})


@pytest.mark.parametrize(
    "fields", [{}, {"axial_pos_shape": (6, 8), "axial_pos_embds_dim": (4, 12)}], ids=["places", "axes"]
)
def test_a_reformer_comes_back_from_a_folder_and_texts_become_vectors(fields, tmp_path):
    model = drawn(**fields, pattern=(seeded(LSH, 0), LOCAL))
    save_encoder(tmp_path / "model", model, TOKENIZER, layout="reformer")
    loaded, tokens = load_sentence_encoder(tmp_path / "model"), torch.randint(10, (2, 45))
    torch.testing.assert_close(loaded.model(tokens), model(tokens))
    assert loaded.embed(["abcdefghij" * 4, "a"]).shape == (2, 32)
    torch.testing.assert_close(loaded.embed(["abcdefghij" * 4, "a"])[1], loaded.embed(["a"])[0])


def test_rows_and_columns_make_every_place_of_a_grid():
    model = drawn(axial_pos_shape=(6, 8), axial_pos_embds_dim=(4, 12))
    found = model.positions(torch.arange(48))
    row, column = model.positions.row, model.positions.column
    for place in (0, 7, 8, 30, 47):
        assert torch.equal(found[place], torch.cat([row[place // 8, 0], column[0, place % 8]]))


def test_what_enters_a_block_follows_from_what_leaves_it():
    block = drawn().double().blocks[1]
    one, two = torch.randn(2, 2, 16, 16, dtype=torch.float64)
    first, second = block(one, two, None)
    again = second - block.feed_forward(block.feed_forward_norm(first))
    torch.testing.assert_close(again, two)
    torch.testing.assert_close(first - block.attention(block.attention_norm(again)), one)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mechanism": "mha", "pattern": ()}, "other mechanisms"),
        ({"pattern": (AttentionChoice(mechanism="lsh", options={"chunk": 8}),)}, "hashing other"),
        ({"pattern": (AttentionChoice(mechanism="chunk_ring", options={"reach": 2}),)}, "more than one other"),
        ({"pattern": (LSH, AttentionChoice(mechanism="chunk_ring", options={"chunk": 4}))}, "differ in size"),
        ({"pattern": (seeded(LSH, 3), seeded(LSH, 4))}, "seeds"),
        ({"pattern": (LSH, AttentionChoice(mechanism="lsh", options=HASHED | {"rounds": 1}))}, "rounds that differ"),
    ],
)
def test_what_the_layout_cannot_say_is_not_written(fields, said, tmp_path):
    with pytest.raises(Incompatible, match=said):
        save_encoder(tmp_path / "model", drawn(**fields), layout="reformer")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_layers": ["full"]}, "attn_layers"),
        ({"attn_layers": []}, "attn_layers"),
        ({"num_buckets": None}, "num_buckets: None.*even number"),
        ({"num_buckets": 3}, "buckets: 3"),
        ({"lsh_num_chunks_after": 1}, "lsh_num_chunks_after"),
        ({"local_attn_chunk_length": 4}, "local_attn_chunk_length"),
        ({"is_decoder": True}, "is_decoder"),
        ({"axial_pos_shape": [2, 8]}, "axial_pos_shape.*at least max_seq_len"),
        ({"axial_pos_embds_dim": [4, 4]}, "axial_pos_embds_dim.*sum is hidden_size 16"),
        ({"axial_pos_shape": [48]}, "axial_pos_shape"),
        ({"attention_head_size": 8}, "query_key.weight"),
        ({"attn_layers": ["local", "lsh", "lsh"]}, r"encoder\.layers\.2"),
        ({"sliding_window": 3}, "sliding_window"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_its_key(change, said, tmp_path):
    model = drawn(axial_pos_shape=(6, 8), axial_pos_embds_dim=(4, 12), pattern=(LOCAL, seeded(LSH, 1)))
    folder = save_encoder(tmp_path / "model", model, TOKENIZER, layout="reformer")
    (folder / "manifest.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises((CheckpointInvalid, InvalidValue), match=said):
        load_sentence_encoder(folder)


def rotated_as_theirs(model, dtype):
    """The rotations that theirs draws by the seed 5 at every call, one set a head."""
    torch.manual_seed(5)
    rotations = torch.randn(2, 4, 2, 2, dtype=getattr(torch, dtype)).permute(0, 2, 1, 3)
    for block in model.blocks:
        if block.attention.inner is not None:
            block.attention.inner.rotations = rotations.double()
    return model


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("padding", sorted(KEEPS))
@pytest.mark.parametrize("axial", [True, False], ids=["axes", "places"])
def test_a_reformer_has_the_rows_of_transformers_both_ways(axial, padding, dtype, tolerance, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    # Theirs adds it to the mean of the squares of keys that become of length one.
    monkeypatch.setattr(LSHSelfAttention, "_len_norm", partialmethod(LSHSelfAttention._len_norm, epsilon=0.0))
    config = transformers.ReformerConfig(
        **THEIRS, attn_layers=["local", "lsh", "lsh"], hash_seed=5, axial_pos_embds=axial
    )
    torch.manual_seed(0)
    peer = transformers.ReformerModel(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("layer_norm.weight" in name), std=0.3)
    peer.save_pretrained(tmp_path / "theirs")
    for name, content in TOKENIZER.files().items():
        given = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "theirs" / name).write_bytes(given)
    model = rotated_as_theirs(load_sentence_encoder(tmp_path / "theirs", dtype).model, dtype)
    save_encoder(tmp_path / "ours", model, layout="reformer")
    back = transformers.ReformerModel.from_pretrained(tmp_path / "ours").to(getattr(torch, dtype)).eval()
    # Theirs reads tables of rows and columns in float32 whatever type is asked for.
    back.load_state_dict(load_file(tmp_path / "ours" / "model.safetensors"))
    assert back.config.hash_seed == 5
    key_padding_mask = KEEPS[padding]
    tokens = torch.randint(10, key_padding_mask.shape)
    with torch.no_grad():
        ours = model(tokens, key_padding_mask)
        for their in (peer, back):
            for row in range(3):
                # Before their first chunk stands the last of the longest text; before ours that of the text itself.
                length = int(key_padding_mask[row].nonzero().max()) + 1
                mask = key_padding_mask[row : row + 1, :length]
                expected = their(tokens[row : row + 1, :length], attention_mask=mask.long()).last_hidden_state
                torch.testing.assert_close(ours[row, :length][mask[0]], expected[mask], rtol=0, atol=tolerance)
