"""Vocabularies in GGUF split texts as the tokenizers that the models were trained with."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import tokenizers
from attn_core.errors import UnknownName
from attn_models.sources.gguf_files import check_round_trip
from attn_models.tokenizers import tokenizer_from_gguf
from attn_models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_named
from attn_models.weights import read_gguf_header

TEXT = "They'RE हिन्दी 12345\t 7/8!!\n\n  naïve你好、x"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        # By the published files of Llama 3.1, Qwen 3, GPT-4o and DeepSeek 3, and Mistral's Tekken file.
        ("llama-bpe", "They|'RE| ह|िन|्द|ी| |123|45|\t| |7|/|8|!!\n\n| | naïve你好|、x"),
        ("qwen2", "They|'RE| ह|िन|्द|ी| |1|2|3|4|5|\t| |7|/|8|!!\n\n| | naïve你好|、x"),
        ("gpt-4o", "They'RE| हिन्दी| |123|45|\t| |7|/|8|!!\n\n| | naïve你好|、x"),
        ("tekken", "They|'RE| हिन्दी| |1|2|3|4|5|\t| |7|/|8|!!\n\n| | naïve你好|、x"),
        ("deepseek-v3", "They|'RE| हिन्दी| |123|45|\t |7|/|8|!!\n\n| | naïve|你好|、|x"),
        # Equal to llama.cpp over vocabulary-only files.
        ("gpt-2", "They|'|RE| ह|ि|न|्|द|ी| 12345|\t| 7|/|8|!!|\n\n | naïve你好|、|x"),
        ("smollm", "They|'|RE| ह|ि|न|्|द|ी| |1|2|3|4|5|\t |7|/|8|!!|\n\n | naïve你好|、|x"),
        ("bloom", "They'RE| हिन्दी| 12345|\t| 7/8|!!\n\n | naïve你好|、|x"),
    ],
)
def test_a_text_is_split_as_by_the_published_tokenizer(name: str, pieces: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre_tokenizer_named(name).apply(backend)
    found = backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert "|".join(TEXT[start:end] for _, (start, end) in found) == pieces


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_step_loses_text(name: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre_tokenizer_named(name).apply(backend)
    pieces = backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert tokenizers.decoders.ByteLevel().decode([piece for piece, _ in pieces]) == TEXT


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(UnknownName, match="llama-bpee"):
        pre_tokenizer_named("llama-bpee")


def sentencepiece_file(path: Path, **flags: bool) -> Path:
    """The blank's and a few words' pieces with bytes; special tokens where llama.cpp expects them, and not named."""
    words = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_token_scores([0.0] * 259 + [-float(place) for place in range(len(words))])
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_sentencepiece_puts_a_blank_in_front_and_behind_special_tokens(tmp_path: Path) -> None:
    """As Llama 2's tokenizer.json and llama.cpp do; the text that comes back differs by that blank only."""
    tokenizer = tokenizer_from_gguf(read_gguf_header(sentencepiece_file(tmp_path / "spm.gguf")))
    check_round_trip(tokenizer, tmp_path)
    spelled = [tokenizer.token(one) for one in tokenizer.encode("ab</s>a")]
    assert spelled == ["<s>", "▁ab", "</s>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert (tokenizer.bos_id, tokenizer.unk_id, tokenizer.end_ids) == (1, 0, {2})


def test_the_tokens_around_a_text_are_those_of_the_file(tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer = tokenizer_from_gguf(read_gguf_header(sentencepiece_file(tmp_path / "spm.gguf", **flags)))
    check_round_trip(tokenizer, tmp_path)
    assert [tokenizer.token(one) for one in tokenizer.encode("ab a")] == ["ab", "▁a", "</s>"]
