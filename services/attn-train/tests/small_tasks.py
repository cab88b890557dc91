"""A small model and dataset of each kind that can be trained."""

from __future__ import annotations

import json

import numpy as np
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.training import DataConfig, ModelConfig, TrainingConfig
from attn_train.data.images import load_images
from attn_train.data.load import load_dataset
from attn_train.data.treebank import load_tags
from attn_train.tasks.instruction_tuning import chat_dataset
from attn_train.tasks.language_modeling import tokenize
from attn_train.tasks.masked_language_modeling import MaskedTextDataset

DECODER = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=24, mechanism="mha", positions="rotary")
SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
SENTENCE = "1\t{0}\t{0}\tNOUN\tNN\t_\t2\tnsubj\t_\t_\n2\t{1}\t{1}\tVERB\tVB\t_\t0\troot\t_\t_\n\n"


def text(words, tmp_path):
    return DECODER, tokenize(words)


def masked(words, tmp_path):
    return ModelConfig.of("masked_lm", SIZES | {"max_seq_len": 12}), MaskedTextDataset.of(tokenize(words))


def completions(words, tmp_path):
    data = DataConfig(dataset="recall", max_pairs=300, tokenizer="word")
    return DECODER, load_dataset(TrainingConfig(model=DECODER, data=data), tmp_path, lambda _: None)


def pairs(words, tmp_path):
    model = ModelConfig.of("transformer", SIZES | {"max_seq_len": 24, "max_encoder_len": 24})
    data = DataConfig(dataset="recall", max_pairs=300)
    return model, load_dataset(TrainingConfig(model=model, data=data), tmp_path, lambda _: None)


def images(words, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (100, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", x=pixels, y=np.arange(100) % 3)
    found = load_images(DataConfig(dataset=str(tmp_path / "i.npz"), validation_fraction=0.6))
    return ModelConfig.of("vit", SIZES | {"patch": 2}), found


def tags(words, tmp_path):
    (tmp_path / "en-train.conllu").write_text(SENTENCE.format("dogs", "run"))
    sentences = (SENTENCE.format("x" * (number % 5 + 1), "y" * (number % 3 + 1)) for number in range(60))
    (tmp_path / "en-dev.conllu").write_text("".join(sentences))
    found = load_tags(DataConfig(dataset=str(tmp_path)), 64, "byte_pairs:260")
    return ModelConfig.of("tagger", SIZES | {"max_seq_len": 64}), found


def chats(words, tmp_path):
    template = "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '.' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
    tokenizer = Tokenizer(
        character_tokenizer("<>abcdefghijklmnopqrstuvwxyz. ").backend,
        TokenizerSettings(chat_template=template, eos_token="."),
    )
    lines = (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ya" * (number % 7)}]}
        for number in range(80)
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DECODER, chat_dataset(
        DataConfig(dataset=str(tmp_path / "c.jsonl"), validation_fraction=0.6), tokenizer, max_length=24
    )


EVERY = [text, masked, completions, pairs, images, tags, chats]
