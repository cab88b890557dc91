"""Encoders: BERT's rows in BERT's folders, padding that changes nothing, and sentences as vectors."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.adapters.bert import BertAdapter
from attn_models.adapters.state_dict import stored_tensors
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.loading.encoders import save_encoder
from attn_models.loading.sentences import SentenceEncoder, load_sentence_encoder
from attn_models.tokenizers import character_tokenizer
from attn_models.weights import write_folder
from attn_testing.checkpoints import require_same_model
from safetensors.torch import load_file, save_file

TOKENIZER = character_tokenizer("abcdefgh ")
CONFIG = EncoderConfig(vocab_size=9, max_seq_len=12, hidden_size=16, num_layers=2, num_heads=4, intermediate_size=24)
THEIRS = {
    "model_type": "bert",
    "vocab_size": 9,
    "max_position_embeddings": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    model = Encoder(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.fixture
def folder(encoder, tmp_path):
    tensors = stored_tensors(encoder.state_dict(), BertAdapter())
    write_folder(tmp_path / "bert", THEIRS, tensors, TOKENIZER.files())
    (tmp_path / "bert" / "manifest.json").unlink()
    return tmp_path / "bert"


def test_a_text_has_the_same_vector_alone_and_beside_longer_ones(encoder):
    sentences = SentenceEncoder(encoder, TOKENIZER)
    texts = ["abc", "hgfedcba abc", "a", "abc"]
    together = sentences.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        torch.testing.assert_close(sentences.embed([text])[0], vector)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(4))


def test_the_vector_is_the_mean_of_the_rows(encoder):
    ids = torch.tensor([TOKENIZER.encode("head")])
    mean = encoder(ids)[0].double().mean(0)
    expected = (mean / mean.square().sum().sqrt()).float()
    torch.testing.assert_close(SentenceEncoder(encoder, TOKENIZER).embed(["head"])[0], expected)


def test_more_texts_than_a_batch_keep_their_order(encoder):
    sentences = SentenceEncoder(encoder, TOKENIZER)
    texts = ["abcdefgh"[: 1 + n % 8] for n in range(70)]
    vectors = sentences.embed(texts)
    for n in (0, 7, 35, 69):
        torch.testing.assert_close(vectors[n], sentences.embed([texts[n]])[0])


def test_what_follows_changes_what_came_before(encoder):
    first, second = encoder(torch.tensor([[1, 2, 3], [1, 2, 4]]))
    assert not torch.allclose(first[0], second[0])


def test_a_folder_comes_back_with_or_without_a_prefix_and_heads(encoder, folder):
    tokens = torch.tensor([[1, 2, 3]])
    require_same_model(load_sentence_encoder(folder).model, encoder, tokens)
    named = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    named |= {"bert.pooler.dense.weight": torch.zeros(16, 16), "cls.predictions.bias": torch.zeros(9)}
    named |= {"bert.embeddings.position_ids": torch.arange(12)[None]}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    require_same_model(load_sentence_encoder(folder).model, encoder, tokens)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model_type": "llama"}, UnknownName, "llama"),
        ({"hidden_act": "tanh"}, CheckpointInvalid, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, CheckpointInvalid, "position_embedding_type"),
        ({"is_decoder": True}, CheckpointInvalid, "is_decoder"),
        ({"vocab_size": None}, CheckpointInvalid, "vocab_size"),
        ({"num_attention_heads": 3}, CheckpointInvalid, "num_attention_heads"),
        ({"vocab_size": 8}, CheckpointInvalid, "word_embeddings"),
        ({"intermediate_size": 23}, CheckpointInvalid, "intermediate.dense.weight"),
        ({"num_hidden_layers": 3}, CheckpointInvalid, "encoder.layer.2"),
        ({"num_hidden_layers": 10**9}, CheckpointInvalid, "num_hidden_layers: 1000000000"),
        ({"vocab_size": 10**12}, CheckpointInvalid, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, CheckpointInvalid, "quantization_config"),
    ],
)
def test_a_folder_that_is_no_such_encoder_is_refused_by_what_is_wrong(folder, change, error, said):
    (folder / "config.json").write_text(json.dumps(THEIRS | change))
    with pytest.raises(error, match=said):
        load_sentence_encoder(folder)


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(encoder, folder):
    save_encoder(folder / "more", encoder, character_tokenizer("abcdefghij "))
    with pytest.raises(CheckpointInvalid, match="11 tokens, but the embedding only 9 rows"):
        load_sentence_encoder(folder / "more")


def test_keys_that_are_not_known_and_code_of_its_own_are_said(folder, caplog):
    (folder / "config.json").write_text(json.dumps(THEIRS | {"frobnicate": 1, "auto_map": {"AutoModel": "x.Y"}}))
    load_sentence_encoder(folder)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "unknown config keys, which are ignored: frobnicate" in said
    assert "auto_map" in said


def test_weights_that_are_no_numbers_are_refused_by_their_name(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.output.dense.bias"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointInvalid, match=r"encoder\.layer\.1\.output\.dense\.bias"):
        load_sentence_encoder(folder)


@pytest.mark.parametrize(
    ("texts", "said"),
    [([], "at least one"), ("abc", "in a list"), (["a", ""], r"texts\[1\]"), (["a" * 13], "13 tokens")],
)
def test_texts_that_do_not_fit_are_refused(encoder, texts, said):
    with pytest.raises(InvalidValue, match=said):
        SentenceEncoder(encoder, TOKENIZER).embed(texts)


def test_a_mechanism_that_cannot_see_both_ways_is_refused():
    with pytest.raises(Incompatible, match="mha"):
        Encoder(EncoderConfig(**vars(CONFIG) | {"mechanism": "lstmn"}))


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_rows_are_those_of_transformers(tmp_path, dtype, tolerance):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig(**THEIRS)).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("LayerNorm.weight" in name), std=0.2)
    peer.save_pretrained(tmp_path)
    for name, content in TOKENIZER.files().items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    model = load_sentence_encoder(tmp_path, dtype).model
    tokens = torch.randint(9, (3, 8))
    key_padding_mask = torch.arange(8) < torch.tensor([[8], [5], [1]])
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=key_padding_mask.long()).last_hidden_state
    torch.testing.assert_close(
        model(tokens, key_padding_mask)[key_padding_mask], theirs[key_padding_mask], rtol=0, atol=tolerance
    )
