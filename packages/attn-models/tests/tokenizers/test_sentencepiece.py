"""SentencePiece's files are read as SentencePiece reads them; what would differ is refused."""

from __future__ import annotations

import json
import random

import pytest
from attn_core.errors import CheckpointInvalid, UserError
from attn_models.tokenizers import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
SENTENCE = "the quick brown fox jumps over lazy dogs and naïve café owners 2024 3.14 {x: y} 你好 世界 हिन्दी"
WORDS = SENTENCE.split()
EXACT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
LLAMA = {"model_type": "bpe", "vocab_size": 420, "split_digits": True, "allow_whitespace_only_pieces": True, **EXACT}
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "<mark>"]}
T5 = {"model_type": "unigram", "vocab_size": 120, "unk_surface": "?"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a model on made sentences; returns its folder."""
    draw = random.Random(0)
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("\n".join("  ".join(draw.choices(WORDS, k=9)) for _ in range(400)))

    def train(**options):
        folder = tmp_path_factory.mktemp("model")
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(folder / "tokenizer"), hard_vocab_limit=False, minloglevel=2, **options
        )
        return folder

    return train


def hard_texts(count=400):
    draw = random.Random(1)
    pieces = [*WORDS, *"  \t\n.,'Äß½①👍🏽ｶ", "   ", "<mark>"]
    return ["".join(draw.choices(pieces, k=draw.randrange(12))) for _ in range(count)]


@pytest.mark.parametrize("options", [LLAMA, GEMMA, T5 | EXACT | {"vocab_size": 500}, T5, LLAMA | {"vocab_size": 500}])
def test_hard_texts_have_the_tokens_and_the_text_of_sentencepiece(trained, options):
    folder = trained(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ours = Tokenizer.from_folder(folder)
    for text in hard_texts():
        ids = theirs.encode(text)
        assert ours.encode(text) == [ours.bos_id, *ids], text
        if options.get("byte_fallback"):
            assert ours.decode(ids) == theirs.decode(ids)


def test_a_saved_folder_keeps_the_tokens_and_the_class_decides_on_the_ends(trained, tmp_path):
    folder = trained(**LLAMA)
    tokenizer = Tokenizer.from_folder(folder)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode("the  fox") == tokenizer.encode("the  fox")
    assert (again.bos_id, again.end_ids) == (1, {2})
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    assert Tokenizer.from_folder(folder).encode("fox")[-1] == 2


def test_what_is_read_otherwise_is_refused(trained, tmp_path):
    prefixed_symbols = LLAMA | {"user_defined_symbols": ["fo"]}
    for options in (prefixed_symbols, T5 | {"treat_whitespace_as_suffix": True}, {"model_type": "char"}):
        with pytest.raises(UserError, match=r"otherwise|treat_whitespace_as_suffix|model_type"):
            Tokenizer.from_folder(trained(**options))
    folder = trained(**LLAMA)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
    with pytest.raises(UserError, match="XLMRobertaTokenizer"):
        Tokenizer.from_folder(folder)
    (tmp_path / "tokenizer.model").write_bytes(b"no such file\xff")
    with pytest.raises(CheckpointInvalid, match="no SentencePiece file"):
        Tokenizer.from_folder(tmp_path)
