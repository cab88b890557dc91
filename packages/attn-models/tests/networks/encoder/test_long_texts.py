"""Longformer and BigBird: transformers' rows in transformers' folders, both ways, and encoders of any mechanism."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import ENCODER_ADAPTERS, encoder_adapter
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder, MaskedLanguageModel
from attn_models.loading.encoders import is_encoder, save_encoder
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import AttentionChoice
from attn_testing.checkpoints import require_same_model

TOKENIZER = character_tokenizer("abcdefghij")
SIZES = {
    "vocab_size": 10,
    "max_seq_len": 60,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
}
LONG = {"mechanism": "longformer", "positions": "real", "first_position": 2}
WINDOWS = tuple(
    AttentionChoice(mechanism="longformer", options={"window": window, "global_positions": [0, 5]}) for window in (4, 8)
)
THEIRS = {
    "vocab_size": 10,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 62,
    "pad_token_id": 1,
}
KEEPS = {
    "whole": torch.ones(3, 50, dtype=torch.bool),
    "right": torch.arange(50) < torch.tensor([[50], [37], [9]]),
    "left": torch.arange(50) >= torch.tensor([[0], [13], [41]]),
}


def drawn(**fields) -> Encoder:
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(**SIZES | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def random_peer(peer, dtype):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("LayerNorm.weight" in name), std=0.2)
    return peer.to(getattr(torch, dtype)).eval()


def written(folder, peer):
    """Their folder with a tokenizer, which they have none of."""
    peer.save_pretrained(folder)
    for name, content in TOKENIZER.files().items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def tokens_of(key_padding_mask):
    return torch.where(
        key_padding_mask, torch.randint(2, 10, key_padding_mask.shape, generator=torch.Generator().manual_seed(1)), 1
    )


@pytest.mark.parametrize("fields", [LONG, LONG | {"pattern": WINDOWS}, {"mechanism": "bigbird"}], ids=str)
def test_an_encoder_for_long_texts_comes_back_from_a_folder(fields, tmp_path):
    model, layout = drawn(**fields), "big_bird" if fields["mechanism"] == "bigbird" else "longformer"
    save_encoder(tmp_path / "model", model, TOKENIZER, layout=layout)
    assert is_encoder(tmp_path / "model")
    tokens = torch.randint(2, 10, (2, 50))
    require_same_model(load_sentence_encoder(tmp_path / "model").model, model, tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"mechanism": "performer"},
        {"mechanism": "linformer", "options": {"rank": 7}},
        {"mechanism": "lsh", "options": {"chunk": 8}},
        {"pattern": (AttentionChoice(mechanism="mha"), AttentionChoice(mechanism="block_local"))},
        LONG,
    ],
    ids=str,
)
def test_an_encoder_of_any_mechanism_is_kept_in_a_folder_of_ours(fields, tmp_path):
    model = drawn(**fields)
    save_encoder(tmp_path / "model", model, TOKENIZER)
    loaded = load_sentence_encoder(tmp_path / "model")
    tokens = torch.randint(2, 10, (2, 50))
    require_same_model(loaded.model, model, tokens)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["requires"].keys() >= {"attn-variants"}
    together = loaded.embed(["abcdefghij", "jihgf" * 8, "a"])
    torch.testing.assert_close(loaded.embed(["a"])[0], together[2])


def test_linformer_whose_projections_change_nothing_is_bert():
    options = {"rank": 60, "sharing": "keys_values"}
    bert, same = drawn().double(), drawn(mechanism="linformer", options=options).double()
    names = bert.state_dict()
    missing, extra = same.load_state_dict(names, strict=False)
    assert not extra
    assert all(".inner." in name for name in missing)
    with torch.no_grad():
        for name in missing:
            same.get_parameter(name).copy_(torch.eye(60).reshape(same.get_parameter(name).shape))
    tokens = torch.randint(10, (2, 60))
    torch.testing.assert_close(same(tokens), bert(tokens), rtol=0, atol=1e-12)


def test_performer_comes_nearer_to_bert_the_more_features_it_has():
    bert, tokens = drawn().double(), torch.randint(10, (2, 60))
    far = []
    for features in (4, 64, 4096):
        same = drawn(mechanism="performer", options={"features": features}).double()
        missing, _ = same.load_state_dict(bert.state_dict(), strict=False)
        assert {name.rpartition(".")[2] for name in missing} == {"projection"}
        with torch.no_grad():
            far.append((same(tokens) - bert(tokens)).abs().mean().item())
    assert far[0] > far[1] > far[2]
    assert far[2] < 0.05


def test_only_real_tokens_are_numbered_where_the_config_says_so():
    model = drawn(**LONG)
    tokens, key_padding_mask = torch.randint(2, 10, (1, 9)), torch.arange(12)[None] >= 3
    padded = torch.cat([torch.ones(1, 3, dtype=torch.int64), tokens], dim=1)
    moved = model.positions.rows(padded, key_padding_mask)
    assert torch.equal(moved[0, 3:], model.positions.rows(tokens, None)[0])
    assert torch.equal(moved[0, :3], model.positions.weight[1].expand(3, -1))


@pytest.mark.parametrize(
    ("layout", "fields", "said"),
    [
        ("bert", LONG, "positions 'real'"),
        ("bert", {"mechanism": "performer"}, "performer"),
        ("big_bird", {"mechanism": "performer"}, "performer"),
        ("big_bird", {"mechanism": "bigbird", "options": {"seed": 3}}, "seeds"),
        ("longformer", {"mechanism": "longformer"}, "positions 'every'"),
        ("longformer", LONG | {"mechanism": "mha"}, "mha"),
        ("longformer", LONG | {"options": {"window": 3}}, "odd windows"),
    ],
)
def test_what_a_layout_cannot_say_is_not_written(layout, fields, said, tmp_path):
    with pytest.raises(Incompatible, match=said):
        save_encoder(tmp_path / "model", drawn(**fields), layout=layout)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("longformer", {"attention_window": 3}, "attention_window.*even"),
        ("longformer", {"attention_window": [4]}, "2 of them"),
        ("longformer", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("longformer", {"global_positions": [-1]}, "global_positions"),
        ("longformer", {"num_attention_heads": 3}, "num_attention_heads"),
        ("big_bird", {"attention_type": "some"}, "attention_type"),
        ("big_bird", {"use_bias": False}, "use_bias"),
        ("big_bird", {"block_size": 0}, "block"),
        ("big_bird", {"rescale_embeddings": True}, "rescale_embeddings"),
        ("big_bird", {"is_decoder": True}, "is_decoder"),
        ("attn_encoder", {"encoder": 3}, "encoder"),
        ("attn_encoder", {"encoder": {"vocab_size": 3}}, "needs it"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_its_key(layout, change, said, tmp_path):
    fields = {"longformer": LONG, "big_bird": {"mechanism": "bigbird"}, "attn_encoder": {}}[layout]
    folder = save_encoder(tmp_path / "model", drawn(**fields), TOKENIZER, layout=layout)
    (folder / "manifest.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises((CheckpointInvalid, InvalidValue), match=said):
        load_sentence_encoder(folder)


def test_global_tokens_of_each_sequence_are_those_of_the_config_where_they_are_the_same():
    model, fixed = drawn(**LONG | {"options": {"global_positions": []}}), drawn(**LONG)
    fixed.load_state_dict(model.state_dict())
    tokens = torch.randint(2, 10, (2, 50))
    first = (torch.arange(50) == 0).expand(2, -1)
    masked, alike = MaskedLanguageModel(model), MaskedLanguageModel(fixed)
    alike.load_state_dict(masked.state_dict())
    torch.testing.assert_close(masked(tokens, global_tokens=first), alike(tokens))
    assert not torch.allclose(masked(tokens), alike(tokens))


@pytest.mark.parametrize(
    "fields", [{}, {"mechanism": "bigbird"}, LONG | {"pattern": (*WINDOWS[:1], AttentionChoice(mechanism="mha"))}]
)
def test_global_tokens_are_refused_where_a_layer_has_none(fields):
    with pytest.raises(InvalidValue, match=r"global_tokens: the attention '(mha|bigbird)' of layer .*longformer"):
        drawn(**fields)(torch.randint(2, 10, (1, 9)), global_tokens=torch.ones(1, 9, dtype=torch.bool))


def test_an_unknown_kind_and_an_unknown_field_are_named():
    with pytest.raises(UnknownName, match="longformer"):
        encoder_adapter("longformr")
    with pytest.raises(UnknownName, match="vocab_size"):
        EncoderConfig.from_plain(SIZES | {"vocabulry": 3})


@pytest.mark.oracle
@pytest.mark.parametrize("layout", sorted(set(ENCODER_ADAPTERS) - {"attn_encoder"}))
def test_everything_that_transformers_writes_is_understood(layout, tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(layout)
    check_unread_keys(json.loads(config.to_json_string(use_diff=False)), encoder_adapter(layout).known_keys, tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("attn_models")]


@pytest.mark.oracle
@pytest.mark.parametrize("padding", sorted(KEEPS))
@pytest.mark.parametrize("places", [(), (0, 15)], ids=["windows", "global"])
def test_longformer_has_the_rows_of_transformers_both_ways(places, padding, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LongformerConfig(**THEIRS, attention_window=[4, 8], global_positions=list(places))
    peer = random_peer(transformers.LongformerModel(config), "float32")
    model = load_sentence_encoder(written(tmp_path / "theirs", peer)).model
    key_padding_mask = KEEPS[padding]
    chosen = torch.zeros(3, 50, dtype=torch.int64)
    chosen[:, list(places)] = 1
    save_encoder(tmp_path / "ours", model, layout="longformer")
    back = transformers.LongformerModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False).eval()
    assert back.config.attention_window == [4, 8]
    with torch.no_grad():
        for their in (peer, back):
            arguments = {"attention_mask": key_padding_mask.long(), "global_attention_mask": chosen}
            expected = their(tokens_of(key_padding_mask), **arguments).last_hidden_state
            torch.testing.assert_close(
                model(tokens_of(key_padding_mask), key_padding_mask)[key_padding_mask],
                expected[key_padding_mask],
                rtol=0,
                atol=1e-5,
            )


@pytest.mark.oracle
@pytest.mark.parametrize("padding", sorted(KEEPS))
def test_longformer_has_the_rows_of_transformers_where_each_sequence_has_global_tokens_of_its_own(padding, tmp_path):
    transformers = pytest.importorskip("transformers")
    peer = random_peer(
        transformers.LongformerModel(transformers.LongformerConfig(**THEIRS, attention_window=4)), "float32"
    )
    model = load_sentence_encoder(written(tmp_path / "theirs", peer)).model
    key_padding_mask = KEEPS[padding]
    tokens = tokens_of(key_padding_mask)
    chosen = torch.zeros(3, 50, dtype=torch.bool)
    for row, places in enumerate([(0, 7, 30), (13, 14), (41,)]):
        chosen[row, list(places)] = True
    chosen &= key_padding_mask
    with torch.no_grad():
        arguments = {"attention_mask": key_padding_mask.long(), "global_attention_mask": chosen.long()}
        expected = peer(tokens, **arguments).last_hidden_state
        ours = model(tokens, key_padding_mask, global_tokens=chosen)
    torch.testing.assert_close(ours[key_padding_mask], expected[key_padding_mask], rtol=0, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("padding", sorted(KEEPS))
@pytest.mark.parametrize("kind", ["block_sparse", "original_full"])
def test_big_bird_has_the_rows_of_transformers_both_ways(kind, padding, dtype, tolerance, tmp_path):
    transformers = pytest.importorskip("transformers")
    blocks = {"block_size": 4, "num_random_blocks": 1, "attention_type": kind}
    # In evaluation its random blocks are all block 0, so it is compared in training, without dropout.
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BigBirdConfig(**THEIRS, **blocks, **none)
    peer = random_peer(transformers.BigBirdModel(config), dtype)
    model = load_sentence_encoder(written(tmp_path / "theirs", peer), dtype).model
    save_encoder(tmp_path / "ours", model, layout="big_bird")
    back = transformers.BigBirdModel.from_pretrained(
        tmp_path / "ours", add_pooling_layer=False, dtype=getattr(torch, dtype), **none
    )
    key_padding_mask, tokens = KEEPS[padding], tokens_of(KEEPS[padding])
    with torch.no_grad():
        ours = model(tokens, key_padding_mask)
        for their in (peer.train(), back.train()):
            for row in range(3):
                # The last block of a text is global; to theirs this is the last of the longest text beside it.
                length = int(key_padding_mask[row].nonzero().max()) + 1
                their.set_attention_type(kind)
                if kind == "block_sparse":
                    give_random_blocks(their, model, length)
                mask = key_padding_mask[row : row + 1, :length]
                expected = their(tokens[row : row + 1, :length], attention_mask=mask.long()).last_hidden_state
                torch.testing.assert_close(ours[row, :length][mask[0]], expected[mask], rtol=0, atol=tolerance)


def give_random_blocks(their, model, length):
    """The random blocks of our layers, at the length of whole blocks that theirs are padded to."""
    size, blocks = 4, -(-length // 4)
    for layer, block in zip(their.encoder.layer, model.blocks, strict=True):
        bound, drawn_blocks = block.attention.spec.mask.over(length), []
        for head in range(4):
            mask = bound.of_head(head)
            rows = []
            for row in range(1, blocks - 1):
                columns = {key // size for key in range(length) if mask.allows(row * size, key)}
                rows.append(sorted(columns - {0, blocks - 1, row - 1, row, row + 1}))
            drawn_blocks.append(np.array(rows))
        layer.attention.self._bigbird_block_rand_mask_with_head = lambda found=drawn_blocks, **_: found
