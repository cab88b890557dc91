"""GGUF files of encoders: the ids of the published tokenizer and the vectors of the published folder."""

from __future__ import annotations

import re

import gguf
import pytest
import tokenizers
import torch
from attn_core.errors import Incompatible
from attn_models.loading import load_model
from attn_models.loading.encoders import build_encoder
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.sources.gguf_files import convert_gguf
from attn_models.tokenizers import tokenizer_from_gguf
from attn_models.weights import read_folder, read_gguf_header
from attn_testing.gguf_files import TOKENS, named, write_gguf

PIECES = "a the dog cat run ##s ##ning café résumé naive 2024 ##24 20 , . ! ' ( ) 你 好 😀 ##x ##er [ ] ## [x]"
WORDS = PIECES.split()
LOWER = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "cafe", "resume", "berlin"]
CASED = [*LOWER, "Berlin", "The"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXTS = [
    "The Dog runs, RUNNING café!",
    "Résumé 2024 你好 (naive) Berlin's dog.",
    "[MASK] cat 😀 zzz ## [x] a\tthe\n",
    "",
]
IDS = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}


def published(vocabulary, *, lowercase):
    """A tokenizer as transformers builds BERT's of this vocabulary."""
    places = {word: place for place, word in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(places, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [(word, places[word]) for word in ("[CLS]", "[SEP]")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    backend.add_special_tokens(list(SPECIAL))
    return backend


def spelled(word, *, old):
    """A word as llama.cpp's converter writes it, of today or of 2024."""
    if word in SPECIAL or (old and word[0] == "[" and word[-1] == "]"):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def write_vocabulary(writer, vocabulary, *, old=False):
    """The keys that llama.cpp's converter writes: that of today has the first token as "bos", and says the case."""
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([spelled(word, old=old) for word in vocabulary])
    writer.add_token_types([3 if word in SPECIAL else 1 for word in vocabulary])
    for name, word in IDS.items():
        key = "bos" if name == "cls" and not old else name
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", vocabulary.index(word))
    if not old:
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", vocabulary[-1].islower())


@pytest.mark.parametrize("old", [False, True], ids=["today", "2024"])
@pytest.mark.parametrize("vocabulary", [LOWER, CASED], ids=["lower", "cased"])
def test_ids_are_those_of_the_published_tokenizer(vocabulary, old, tmp_path):
    known = [word for word in vocabulary if word not in ("##", "[x]")]
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "bert")
    write_vocabulary(writer, known, old=old)
    writer.add_tensor("token_embd.weight", torch.zeros(len(known), 4).numpy())
    close(writer)
    ours = tokenizer_from_gguf(read_gguf_header(tmp_path / "v.gguf"))
    theirs = published(known, lowercase=vocabulary is LOWER)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids
    assert (ours.settings.cls_token, ours.settings.mask_token) == ("[CLS]", "[MASK]")


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIZES = {
    "vocab_size": len(LOWER),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}


def written(family, folder, *, pooling, quantised=False):
    """A random model of transformers, and a GGUF file of it with the names of the gguf library."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES)
    peer = transformers.AutoModel.from_config(config, add_pooling_layer=False, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("norm" in name.lower() and "weight" in name), std=0.2)
    peer.save_pretrained(folder / "theirs")
    name = family.replace("_", "-")
    writer = gguf.GGUFWriter(folder / "m.gguf", name)
    writer.add_block_count(2)
    writer.add_context_length(48)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_token_type_count(2)
    if family == "nomic_bert":
        writer.add_rope_freq_base(1000.0)
    write_vocabulary(writer, LOWER)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT if family == "bert" else gguf.MODEL_ARCH.NOMIC_BERT, 2)
    tensors = read_folder(folder / "theirs").tensors
    for theirs in tensors.entries:
        rows = tensors[theirs].numpy()
        kept = quantised and rows.ndim == 2 and re.search(r"layer", theirs)
        data = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0) if kept else rows
        own = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(own, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if kept else None)
    close(writer)
    return peer, folder / "m.gguf"


@pytest.mark.oracle
@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS], ids=["mean", "first token"])
@pytest.mark.parametrize("family", ["bert", "nomic_bert"])
@torch.no_grad()
def test_vectors_are_those_of_the_published_folder(family, pooling, tmp_path):
    peer, file = written(family, tmp_path, pooling=pooling)
    ours = load_sentence_encoder(convert_gguf(file, tmp_path / "ours", "float32"))
    theirs = published(LOWER, lowercase=True)
    for text, vector in zip(TEXTS[:3], ours.embed(TEXTS[:3]), strict=True):
        rows = peer(torch.tensor([theirs.encode(text).ids])).last_hidden_state[0]
        expected = rows.mean(0) if pooling == gguf.PoolingType.MEAN else rows[0]
        torch.testing.assert_close(vector, torch.nn.functional.normalize(expected, dim=0), rtol=0, atol=1e-5)


@pytest.mark.oracle
def test_blocks_are_kept_and_other_poolings_refused(tmp_path):
    peer, file = written("bert", tmp_path, pooling=gguf.PoolingType.MEAN, quantised=True)
    folder = convert_gguf(file, tmp_path / "ours", "stored")
    model = build_encoder(read_folder(folder), torch.float32).eval()
    tokens = torch.arange(6, 30)[None]
    with torch.no_grad():
        near = torch.nn.functional.cosine_similarity(model(tokens), peer(tokens).last_hidden_state, dim=-1)
    assert near.min() > 0.999
    (tmp_path / "other").mkdir()
    _, other = written("bert", tmp_path / "other", pooling=gguf.PoolingType.RANK)
    with pytest.raises(Incompatible, match="pooling_type"):
        convert_gguf(other, tmp_path / "never", "float32")


MODERN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
MODERN |= {"max_position_embeddings": 64, "local_attention": 6, "vocab_size": len(TOKENS)}
MODERN |= {f"{word}_token_id": 0 for word in ("pad", "bos", "eos", "cls", "sep")}
MODERN_SAID = {"block_count": 4, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
MODERN_SAID |= {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
MODERN_SAID |= {"rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0, "attention.sliding_window": 6}


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@torch.no_grad()
def test_a_modern_bert_gives_the_states_of_transformers(activation, tmp_path):
    """The file says the activation only since 2026, and the period of layers without windows never by default."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(**MODERN, hidden_activation=activation)
    peer = transformers.AutoModel.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in peer.named_parameters():
        parameter.normal_(mean=float("norm" in name), std=0.2)
    said = MODERN_SAID | ({"hidden_activation": activation} if activation != "gelu" else {})
    tensors = [(named("modern-bert", 4, theirs), tensor) for theirs, tensor in peer.state_dict().items()]
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", "modern-bert", said, tensors), tmp_path / "ours", "float32")
    model = build_encoder(read_folder(folder), torch.float32).eval()
    tokens = torch.randint(len(TOKENS), (2, 33))
    torch.testing.assert_close(model(tokens), peer(tokens).last_hidden_state, rtol=1e-5, atol=2e-5)


T5 = {"vocab_size": 40, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
T5 |= {"n_positions": 64, "decoder_start_token_id": 0, "num_decoder_layers": 1}


@pytest.mark.parametrize("fields", [{"feed_forward_proj": "relu"}, {"feed_forward_proj": "gated-gelu"}], ids=str)
@torch.no_grad()
def test_a_t5_gives_the_logits_of_transformers(fields, tmp_path):
    """With the position table of the cross-attention that the first checkpoints have, and nothing reads."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    # transformers 5 ties every T5; models with gates, which are not tied when they are trained, do not scale.
    scaled = fields["feed_forward_proj"] == "relu"
    config = transformers.T5Config(**T5, **fields, scale_decoder_outputs=scaled)
    peer = transformers.T5ForConditionalGeneration(config).eval()
    for name, parameter in peer.named_parameters():
        parameter.normal_(mean=float("norm" in name), std=0.2)
    peer.save_pretrained(tmp_path / "theirs")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "t5")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_decoder_block_count(1)
    writer.add_head_count(4)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_eps(1e-6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_relative_attn_buckets_count(32)
    writer.add_decoder_start_token_id(0)
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_types([3, 3, 2] + [1] * (len(pieces) - 3))
    writer.add_token_scores([0.0] * 3 + [-1.0] * (len(pieces) - 3))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 2)
    tensors = read_folder(tmp_path / "theirs").tensors
    for theirs in tensors.entries:
        writer.add_tensor(names.get_name(theirs, try_suffixes=(".weight",)), tensors[theirs].numpy())
    writer.add_tensor("dec.blk.0.cross_attn_rel_b.weight", torch.ones(32, 4).numpy())
    close(writer)
    loaded = load_model(convert_gguf(tmp_path / "m.gguf", tmp_path / "ours", "stored"))
    sources, tokens = torch.randint(3, 40, (2, 11)), torch.randint(3, 40, (2, 7))
    theirs = peer(input_ids=sources, decoder_input_ids=tokens).logits
    torch.testing.assert_close(loaded.model(tokens, sources), theirs, rtol=1e-5, atol=1e-5)
    assert loaded.tokenizer.encode("ab a")[-1] == 1
