"""RoBERTa, DistilBERT and ModernBERT: transformers' rows in transformers' folders, and sentences as vectors."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_models.adapters.registry import encoder_adapter
from attn_models.encoder.config import EncoderConfig, ModernBertConfig
from attn_models.loading.encoders import save_encoder
from attn_models.loading.sentences import SentenceEncoder, load_sentence_encoder
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.decoder import AttentionChoice
from attn_testing.checkpoints import require_same_model

SIZES = {"vocab_size": 24, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "intermediate_size": 48}
LOCAL = AttentionChoice(mechanism="attn-variants/sliding_window", options={"window": 4})
FULL = AttentionChoice(mechanism="attn-variants/mha")
CONFIGS = {
    "roberta": EncoderConfig(**SIZES, max_seq_len=20, positions="real", first_position=2, type_vocab_size=1),
    "distilbert": EncoderConfig(**SIZES, max_seq_len=20, type_vocab_size=0),
    "modernbert": ModernBertConfig(**SIZES, max_seq_len=20, pattern=(FULL, LOCAL, LOCAL), feed_forward="geglu"),
}
TEXTS = ["a dog runs", "the cat", "dog", "a cat runs to the dog to the cat"]
TOKENS = torch.randint(3, 24, (3, 14), generator=torch.Generator().manual_seed(3))
KEEP = torch.arange(14) < torch.tensor([[14], [9], [1]])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Word pieces between a token that begins and one that ends, as BERT's and RoBERTa's."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "the", "dog", "cat", "run", "##s", "to", "##ing"]
    vocabulary = {word: place for place, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    backend.add_special_tokens(words[:5])
    return Tokenizer(backend, TokenizerSettings(bos_token="<s>", eos_token="</s>", pad_token="<pad>"))


def drawn(family):
    torch.manual_seed(0)
    model = encoder_adapter(family).build(CONFIGS[family]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and "weight" in name), std=0.2)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_comes_back_and_texts_become_vectors(family, tokenizer, tmp_path):
    model = drawn(family)
    folder = save_encoder(tmp_path / family, model, tokenizer, layout=family)
    loaded = load_sentence_encoder(folder)
    require_same_model(loaded.model, model, TOKENS)
    assert loaded.model.config == CONFIGS[family] or loaded.model.config.mechanisms == CONFIGS[family].mechanisms
    together = loaded.embed(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(loaded.embed([text])[0], vector)
    packed = load_sentence_encoder(folder, quantization="int8").embed(TEXTS)
    assert bool(((packed * together).sum(-1) > 0.99).all())


def test_texts_are_read_as_the_files_of_sentence_transformers_say(tokenizer, tmp_path):
    """The default prompt, the longest text with its special tokens, lower case and the size of a vector."""
    model = drawn("roberta")
    plain = load_sentence_encoder(save_encoder(tmp_path / "plain", model, tokenizer, layout="roberta"))
    folder = save_encoder(tmp_path / "said", model, tokenizer, layout="roberta")
    prompts = {"prompts": {"query": "the dog", "document": ""}, "default_prompt_name": "query", "truncate_dim": 5}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6, "do_lower_case": True}))
    loaded = load_sentence_encoder(folder)
    assert loaded.read([" a CAT to cat"]) == plain.read(["the dog a cat"])
    assert loaded.read([" a"]) == plain.read(["the dog a"])
    expected = plain.embed(["the dog a cat"])[:, :5]
    torch.testing.assert_close(loaded.embed([" a CAT to cat"]), torch.nn.functional.normalize(expected))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"temperature": 2}))
    with pytest.raises(CheckpointInvalid, match="unknown keys temperature"):
        load_sentence_encoder(folder)


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_changes_no_real_row(family):
    model = drawn(family)
    rows = model(torch.where(KEEP, TOKENS, 1), KEEP)
    for row, tokens, keep in zip(rows, TOKENS, KEEP, strict=True):
        torch.testing.assert_close(row[keep], model(tokens[None, keep])[0])


def test_windows_hide_what_is_far_and_the_first_layer_sees_everything():
    model = drawn("modernbert")
    changed = TOKENS.clone()
    changed[:, -1] += 1 - 2 * (changed[:, -1] == 23)
    assert not torch.equal(model(TOKENS)[:, 0], model(changed)[:, 0])
    near = ModernBertConfig(**SIZES, max_seq_len=20, pattern=(LOCAL,), feed_forward="geglu")
    local = encoder_adapter("modernbert").build(near).eval()
    assert torch.equal(local(TOKENS)[:, :7], local(changed)[:, :7])


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("distilbert", {"activation": "swish"}, "activation"),
        ("distilbert", {"hidden_size": 16}, "hidden_size"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"layer_types": [[]] * 3}, "layer_types"),
        ("modernbert", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rope_type"),
        ("modernbert", {"local_attention": 1}, "local_attention"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_its_key(family, change, said, tokenizer, tmp_path):
    folder = save_encoder(tmp_path / family, drawn(family), tokenizer, layout=family)
    (folder / "manifest.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointInvalid, match=said):
        load_sentence_encoder(folder)


def test_what_a_layout_cannot_say_is_not_written(tmp_path):
    for family, other in (("distilbert", "bert"), ("roberta", "distilbert")):
        with pytest.raises(Incompatible, match=r"type_vocab_size|positions"):
            save_encoder(tmp_path / "model", drawn(family), layout=other)
    with pytest.raises(InvalidValue, match="segments"):
        drawn("distilbert")(TOKENS, None, torch.zeros_like(TOKENS))


PEERS = {
    "roberta": ("RobertaModel", {"max_position_embeddings": 22, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"max_position_embeddings": 22, "type_vocab_size": 1}),
    "camembert": ("CamembertModel", {"max_position_embeddings": 22}),
    "distilbert": ("DistilBertModel", {"max_position_embeddings": 20}),
    "modernbert": ("ModernBertModel", {"max_position_embeddings": 20, "local_attention": 6, "pad_token_id": 1}),
}
THEIRS = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}


# Theirs turns a ModernBERT's queries in float32 whatever type is asked for.
CASES = [(family, "float32", 1e-5) for family in PEERS] + [
    (family, "float64", 1e-10) for family in PEERS if family != "modernbert"
]


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "dtype", "tolerance"), CASES)
def test_rows_and_sentences_are_those_of_transformers_both_ways(family, dtype, tolerance, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    kind, fields = PEERS[family]
    torch.manual_seed(0)
    peer = getattr(transformers, kind)
    config = peer.config_class(**THEIRS | fields)
    model = peer._from_config(config, attn_implementation="eager").to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name.lower() and "weight" in name), std=0.2)
    model.save_pretrained(tmp_path / "theirs")
    for name, content in tokenizer.files().items():
        given = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "theirs" / name).write_bytes(given)
    ours = load_sentence_encoder(tmp_path / "theirs", dtype)
    save_encoder(tmp_path / "ours", ours.model, tokenizer, layout=family)
    back = peer.from_pretrained(tmp_path / "ours", attn_implementation="eager", dtype=getattr(torch, dtype)).eval()
    tokens = torch.where(KEEP, TOKENS, 1)
    with torch.no_grad():
        for their in (model, back):
            theirs = their(tokens, attention_mask=KEEP.long()).last_hidden_state
            whole = their(TOKENS[:1], output_attentions=True).attentions
            for layer, weights in ours.model.attention_maps(TOKENS[0], [0, 2]).items():
                torch.testing.assert_close(weights, whole[layer][0], rtol=0, atol=tolerance)
            torch.testing.assert_close(ours.model(tokens, KEEP)[KEEP], theirs[KEEP], rtol=0, atol=tolerance)
        encoding = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "theirs")
        for text, vector in zip(TEXTS, SentenceEncoder(ours.model, tokenizer).embed(TEXTS), strict=True):
            rows = model(torch.tensor([encoding(text)["input_ids"]])).last_hidden_state[0]
            torch.testing.assert_close(
                vector, torch.nn.functional.normalize(rows.mean(0), dim=0), rtol=0, atol=tolerance
            )
