"""Encoders with a head: guesses and tags as transformers computes them, folders, and positions in a tree."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.loading.encoders import load_classifier, load_masked, save_classifier, save_masked
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.tokenizers import character_tokenizer
from attn_models.tokenizers.learned import with_mask
from attn_testing.checkpoints import require_same_model
from safetensors.torch import load_file, save_file

TOKENIZER = with_mask(character_tokenizer("abcdefgh "))
ENCODER = {
    "vocab_size": 10,
    "max_seq_len": 12,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
}
HASHES = {"buckets": 4, "rounds": 2, "chunk": 4, "within": "chunks", "duplicates": "counted", "ring": "rounds"}
PATTERN = [{"mechanism": "lsh", "options": HASHES | {"seed": layer}} for layer in range(2)]
TAGS = ["NOUN", "VERB", "DET"]
TOKENS = torch.tensor([[1, 2, 9, 4, 5, 6, 7], [8, 9, 1, 1, 0, 0, 0]])
KEEP = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def drawn(family, **fields):
    torch.manual_seed(0)
    found = installed().models.get(family)
    model = found.build(found.configure(ENCODER | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("fields", [{}, {"mechanism": "linear"}, {"positions": "real", "first_position": 1}])
def test_a_model_that_guesses_comes_back_and_its_encoder_embeds(tmp_path, fields):
    model = drawn("masked_lm", **fields)
    again, tokenizer = load_masked(save_masked(tmp_path / "m", model, TOKENIZER))
    require_same_model(again, model, TOKENS, KEEP)
    assert tokenizer.mask_id == TOKENIZER.mask_id == 9
    assert load_sentence_encoder(tmp_path / "m").embed(["abc", "h"]).shape == (2, 16)


def test_a_reformer_that_guesses_comes_back(tmp_path):
    model = drawn(
        "reformer_lm", axial_pos_shape=[3.0, 4.0], axial_pos_embds_dim=[4, 12], pattern=PATTERN, feed_forward="relu"
    )
    again, _ = load_masked(save_masked(tmp_path / "m", model, TOKENIZER))
    require_same_model(again, model, TOKENS, KEEP)


@pytest.mark.parametrize("fields", [{}, {"positions": "depth"}])
def test_a_tagger_comes_back_with_its_tags(tmp_path, fields):
    model, depths = drawn("tagger", classes=3, **fields), torch.randint(4, TOKENS.shape)
    again, tags, _ = load_classifier(save_classifier(tmp_path / "m", model, TAGS, TOKENIZER))
    require_same_model(again, model, TOKENS, KEEP, depths)
    assert tags == TAGS


def test_the_logits_are_those_of_the_equation():
    model = drawn("masked_lm").double()
    rows = model.encoder(TOKENS)[0, 3]
    head = model.cls["predictions"]
    dense, norm = head.transform["dense"], head.transform["LayerNorm"]
    shaped = dense.weight @ rows + dense.bias
    shaped = shaped * 0.5 * (1 + torch.erf(shaped / math.sqrt(2)))
    shaped = (shaped - shaped.mean()) / (shaped.var(correction=0) + 1e-12).sqrt() * norm.weight + norm.bias
    expected = torch.stack([shaped @ row for row in model.encoder.embedding.weight]) + head.bias
    torch.testing.assert_close(model(TOKENS)[0, 3], expected)


def test_places_in_a_tree_are_fused_with_those_in_the_sequence():
    positions = drawn("tagger", classes=3, positions="depth").encoder.positions.double()
    depths = torch.tensor([[2, 0, 1]])
    rows = positions.rows(TOKENS[:1, :3], None, depths)

    def wave(place):
        return torch.tensor(
            [(math.sin, math.cos)[i % 2](place / 10000 ** (i // 2 * 2 / 16)) for i in range(16)], dtype=torch.float64
        )

    for place, depth in enumerate(depths[0].tolist()):
        fused = positions.sequential.weight @ wave(place) + positions.structural.weight @ wave(depth)
        torch.testing.assert_close(rows[0, place], fused.tanh())


def test_a_tree_that_is_not_given_is_asked_for():
    model = drawn("tagger", classes=3, positions="depth")
    with pytest.raises(InvalidValue, match="depths"):
        model(TOKENS)
    with pytest.raises(InvalidValue, match="depths"):
        model(TOKENS, depths=torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("family", "fields", "error", "said"),
    [
        ("masked_lm", {"positions": "depth"}, InvalidValue, "no dependency tree"),
        ("masked_lm", {"mechanism": "lstmn"}, Incompatible, "bidirectional"),
        ("masked_lm", {"wdith": 3}, UnknownName, "hidden_size"),
        ("reformer_lm", {"mechanism": "mha"}, Incompatible, "reformer"),
        ("tagger", {}, InvalidValue, "classes"),
        ("vit", {}, UnknownName, "vocab_size"),
    ],
)
def test_what_a_family_cannot_be_is_refused_when_it_is_configured(family, fields, error, said):
    with pytest.raises(error, match=said):
        installed().models.get(family).configure(ENCODER | fields)


def test_a_head_that_is_missing_or_misshaped_is_named(tmp_path):
    folder = save_masked(tmp_path / "m", drawn("masked_lm"), TOKENIZER)
    (folder / "manifest.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    del tensors["cls.predictions.bias"]
    tensors["cls.predictions.transform.dense.bias"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointInvalid) as caught:
        load_masked(folder)
    for said in ("'cls.predictions.bias' is missing", "dense.bias' has shape [3]; its model needs [16]"):
        assert said in caught.value.message


@pytest.mark.oracle
def test_guesses_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = drawn("masked_lm")
    theirs = transformers.BertForMaskedLM.from_pretrained(save_masked(tmp_path / "m", model, TOKENIZER)).eval()
    with torch.inference_mode():
        found = theirs(TOKENS, attention_mask=KEEP.long()).logits
        torch.testing.assert_close(found[KEEP], model(TOKENS, KEEP)[KEEP], atol=1e-5, rtol=1e-5)


@pytest.mark.oracle
def test_tags_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = drawn("tagger", classes=3)
    folder = save_classifier(tmp_path / "m", model, TAGS, TOKENIZER)
    theirs = transformers.BertForTokenClassification.from_pretrained(folder).eval()
    assert theirs.config.id2label == dict(enumerate(TAGS))
    with torch.inference_mode():
        found = theirs(TOKENS, attention_mask=KEEP.long()).logits
        torch.testing.assert_close(found[KEEP], model(TOKENS, KEEP)[KEEP], atol=1e-5, rtol=1e-5)
