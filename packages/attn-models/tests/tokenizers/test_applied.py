"""What stands beside a tokenizer.json acts on its steps as transformers 4 applied it, or is refused by name.

The expected numbers are those of transformers 4.57.3; where 5 still applies a key, it is the oracle itself.
"""

from __future__ import annotations

import json

import pytest
import tokenizers
from attn_core.errors import CheckpointInvalid
from attn_models.tokenizers import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

TEXTS = ("Café  cafe\u0301 The 你好", " a</s> b[MASK]the[SEP]", "", "it's 12")


def write(folder, backend, **config):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bert():
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "The",
        "cafe",
        "Café",
        "café",
        "你",
        "好",
        "你好",
        "##a",
    ]
    backend = tokenizers.Tokenizer(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(pieces[:5])
    return backend


@pytest.fixture
def bytewise():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: n for n, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.oracle
@pytest.mark.parametrize(
    "config",
    [
        {"do_lower_case": False},
        {"do_lower_case": True},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": False, "tokenize_chinese_chars": False},
        {},
        {"do_lower_case": False, "split_special_tokens": True},
        {"do_lower_case": False, "added_tokens_decoder": {"14": {"content": "12", "lstrip": True, "special": False}}},
        {"do_lower_case": False, "added_tokens_decoder": {"5": {"content": "the", "special": True}}},
        {"do_lower_case": False, "extra_special_tokens": ["it"]},
    ],
)
def test_keys_that_transformers_applies_give_its_tokens(tmp_path, bert, config):
    transformers = pytest.importorskip("transformers")
    flags = {"single_word": False, "rstrip": False, "lstrip": False, "normalized": False}
    for token in config.get("added_tokens_decoder", {}).values():
        token.update(flags | token)
    folder = write(tmp_path / "model", bert, tokenizer_class="BertTokenizer", **config)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 99}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert [ours.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize(
    ("config", "ids", "says"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, [256, "a"], "add_bos_token"),
        ({"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": True}, [256, "a", 257], "eos"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, ["a"], "no effect"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, ["Ġ", "a"], "a blank before"),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}, ["a"], None),
        ({"tokenizer_class": "Qwen2Tokenizer"}, ["a"], "its class Qwen2Tokenizer"),
        ({"tokenizer_class": "GPT2Tokenizer"}, ["a"], None),
        ({"some_new_key": 1}, ["a"], "some_new_key"),
    ],
)
def test_ends_and_blanks_are_those_of_the_class_and_are_said(tmp_path, bytewise, config, ids, says):
    tokenizer = Tokenizer.from_folder(write(tmp_path, bytewise, bos_token="<s>", eos_token="</s>", **config))
    assert tokenizer.encode("a") == [bytewise.token_to_id(each) if isinstance(each, str) else each for each in ids]
    assert not tokenizer.remarks if says is None else any(says in remark for remark in tokenizer.remarks)


def test_llamas_blank_is_taken_from_both_ends(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    with_blank = Tokenizer.from_folder(write(tmp_path, backend, tokenizer_class="LlamaTokenizer"))
    without = Tokenizer.from_folder(write(tmp_path, backend, tokenizer_class="LlamaTokenizer", add_prefix_space=False))
    assert (with_blank.encode(" a"), without.encode(" a")) == ([0, 0, 1], [0, 1])
    assert with_blank.decode([0, 0, 1]) == without.decode([0, 1]) == " a"


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"300": {"content": "<new>"}}},
        {"added_tokens_decoder": {"5": {"content": "<s>"}}},
        {"added_tokens_decoder": {"x": {"content": "<new>"}}},
        {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True},
        {"never_split": ["a"]},
        {"src_lang": "de_DE"},
    ],
)
def test_what_contradicts_or_is_not_supported_is_refused(tmp_path, bytewise, config):
    with pytest.raises(CheckpointInvalid, match=next(reversed(config))):
        Tokenizer.from_folder(write(tmp_path, bytewise, **config))


def test_tekkens_expression_replaces_that_of_an_early_conversion(tmp_path, bytewise):
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\p{N}+"), "isolated")
    bytewise.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fixed = Tokenizer.from_folder(write(tmp_path, bytewise, fix_mistral_regex=True))
    pieces = [piece for piece, _ in fixed.backend.pre_tokenizer.pre_tokenize_str("camelCase 12")]
    assert pieces == ["camel", "Case", "Ġ", "1", "2"]
