"""Vocabularies in GGUF split texts as the tokenizers that the models were trained with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers
from attn_core.errors import CheckpointInvalid, UnknownName
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


def vocabulary_file(path: Path, kind: str, tokens: list[str], types: list[int], **values: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in values.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32}
        kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
@pytest.mark.parametrize("fallback", [True, False])
def test_a_unigram_vocabulary_has_the_tokens_of_sentencepiece(rule: str, fallback: bool, tmp_path: Path) -> None:
    """Written as llama.cpp's converter writes T5's."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    draw = random.Random(0)
    sentence = "the quick brown fox jumps over lazy dogs and naïve café owners 2024 3.14 ½ 你好 世界 हिन्दी"
    words = sentence.split()
    (tmp_path / "text").write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=500, hard_vocab_limit=False,
        model_type="unigram", byte_fallback=fallback, normalization_rule_name=rule, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((tmp_path / "m.model").read_bytes())
    charsmap = list(model.normalizer_spec.precompiled_charsmap)
    path = vocabulary_file(
        tmp_path / "t5.gguf",
        "t5",
        [piece.piece for piece in model.pieces],
        [int(piece.type) for piece in model.pieces],
        scores=[float(piece.score) for piece in model.pieces],
        add_space_prefix=model.normalizer_spec.add_dummy_prefix,
        remove_extra_whitespaces=model.normalizer_spec.remove_extra_whitespaces,
        **({"precompiled_charsmap": charsmap} if charsmap else {}),
    )
    ours = tokenizer_from_gguf(read_gguf_header(path))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    for _ in range(300):
        text = "".join(draw.choices([*words, *"  \t.,Äß½①👍🏽ｶ", "   "], k=draw.randrange(12)))
        assert ours.encode(text) == [*theirs.encode(text), 1], text
        if fallback:
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.pad_id, ours.unk_id, ours.end_ids) == (0, 2, {1})


def longest_matches(tokens: dict[bytes, int], text: bytes) -> list[int]:
    """RWKV's rule, byte by byte."""
    found, place = [], 0
    while place < len(text):
        end = next(end for end in range(len(text), place, -1) if text[place:end] in tokens)
        found.append(tokens[text[place:end]])
        place = end
    return found


def test_an_rwkv_vocabulary_takes_the_longest_token_of_bytes(tmp_path: Path) -> None:
    """Also tokens that end within a character, and those whose beginnings are no tokens."""
    draw = random.Random(0)
    pieces = [
        b" the",
        b"abcd",
        b"ab",
        b"a]b",
        b"^-",
        b"\\x",
        b"\n\n",
        b"'\"",
        "你好".encode(),
        "你".encode()[:2],
        b"\xff\xfe",
    ]
    tokens = {token: place for place, token in enumerate([*(bytes([b]) for b in range(256)), *pieces], 1)}
    # As `_set_vocab_rwkv_world` of llama.cpp's converter: Python's spelling, without quotes.
    spelled = ["<s>", *(repr(token)[2:-1] for token in tokens), "[PAD268]"]
    types = [3, *[1] * len(tokens), 5]
    path = vocabulary_file(tmp_path / "rwkv.gguf", "rwkv", spelled, types, bos_token_id=0, eos_token_id=0)
    ours = tokenizer_from_gguf(read_gguf_header(path))
    check_round_trip(ours, path)
    again = tokenizers.Tokenizer.from_str(ours.backend.to_str())
    parts = [*(piece.decode(errors="ignore") for piece in pieces), *"abcd 你好é👍\n^]'\"\\x"]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randrange(20)))
        wanted = longest_matches(tokens, text.encode())
        assert ours.encode(text) == wanted == again.encode(text).ids, text
        assert ours.decode(wanted) == text
    assert (ours.end_ids, len(ours.encode("<s>"))) == ({0}, 1)


def test_an_rwkv_vocabulary_that_cannot_write_every_byte_is_refused(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path / "rwkv.gguf", "rwkv", ["<s>", "ab", "a"], [3, 1, 1])
    with pytest.raises(CheckpointInvalid, match="each byte"):
        tokenizer_from_gguf(read_gguf_header(path))


def test_merged_characters_with_bytes_give_the_tokens_of_their_backend(tmp_path: Path) -> None:
    """In the form of Gemma 3's and 4's tokenizer.json, written as llama.cpp's converter writes Gemma 4's."""
    draw = random.Random(0)
    words = ["the", "quick", "fox", "naïve", "2024", "हिन्दी", "\n\n", "▁"]
    mark = tokenizers.normalizers.Replace(" ", "▁")
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.normalizer = mark
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=90, show_progress=False)
    learner.train_from_iterator((" ".join(draw.choices(words, k=9)) for _ in range(200)), trainer)
    learned = json.loads(learner.to_str())["model"]
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<tool>"]
    tokens = [*named, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    merges = [tuple(merge) for merge in learned["merges"]]
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: place for place, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    theirs.normalizer = mark
    theirs.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    theirs.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    path = vocabulary_file(
        tmp_path / "gemma4.gguf", "gemma4", tokens, [3, 3, 3, 3, 4, *[6] * 256, *[1] * len(learned["vocab"])],
        merges=[" ".join(merge) for merge in merges], scores=[-1000.0] * len(tokens), add_bos_token=True,
        bos_token_id=2, eos_token_id=1, unknown_token_id=3, padding_token_id=0,
    )  # fmt: skip
    ours = tokenizer_from_gguf(read_gguf_header(path))
    for _ in range(300):
        text = "".join(draw.choices([*words, *" .Äß½👍🏽\n", "   ", "<tool>", "<0x41>"], k=draw.randrange(12)))
        expected = theirs.encode(text).ids
        assert ours.encode(text) == [2, *expected], text
        assert ours.decode(expected) == theirs.decode(expected)
    assert (ours.pad_id, ours.unk_id, ours.end_ids) == (0, 3, {1})
