"""What is measured is a fixed set of tokens: what a model cannot read is counted, and no other option changes it."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import word_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.treebank import load_tags, read_sentences, tokenize_sentences
from attn_train.model import configured
from attn_train.tasks.instruction_tuning import chat_dataset
from attn_train.tasks.language_modeling import tokenize
from attn_train.tasks.masked_language_modeling import MaskedTextDataset
from attn_train.tasks.seq2seq import tokenize_pairs
from attn_train.tasks.token_classification import tagging_accuracy
from attn_train.worker import build_model
from small_tasks import DECODER, SENTENCE, chats

RNN = {"hidden_size": 8, "embedding": 8, "maxout": 8, "max_seq_len": 8, "max_encoder_len": 8}


def config(model=DECODER, **fields):
    return TrainingConfig(model=model, data=DataConfig(dataset="/x"), **fields)


def test_conversations_are_measured_alike_whatever_the_length_of_training_sequences(words, tmp_path):
    _, dataset = chats(words, tmp_path)
    model = build_model(config(), dataset).eval()
    found = set()
    for length in (12, 16, 24):
        again = chat_dataset(
            DataConfig(dataset=str(tmp_path / "c.jsonl"), validation_fraction=0.6),
            dataset.tokenizer,
            max_length=length,
        )
        task = again.task(config(DECODER.replace(max_seq_len=length)))
        found.add(task.validation_loss(model, 2, lambda: None))
        assert task.validation_left_out == 0
    assert len(found) == 1
    model.max_seq_len = 12
    task.validation_loss(model, 10, lambda: None)
    longer = sum(len(chat.inputs) > 12 for chat in dataset.validation)
    assert task.validation_left_out == longer > 0


@pytest.mark.parametrize("batches", [1, 3, 100])
def test_the_same_tokens_of_a_text_are_measured_whatever_the_length_of_training_sequences(
    words, monkeypatch, bigram, batches
):
    """By a model whose prediction depends on one token only; all of a short text is measured, each token once."""
    monkeypatch.setattr("attn_train.tasks.base.VALIDATION_TOKENS", 90)
    text, model = tokenize(words), bigram().eval()

    class Copies(torch.nn.Module):
        """Answers a masked token by what is shown there."""

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.linspace(0, 1, 40))

        def encoder(self, tokens):
            return torch.nn.functional.one_hot(tokens, 40) * self.scale

        def logits(self, rows):
            return rows

    found, masked = [], []
    for length in (7, 24, 90, 1000):
        changed = config(DECODER.replace(max_seq_len=length))
        found.append(text.task(changed).validation_loss(model, batches, lambda: None))
        masked.append(MaskedTextDataset.of(text).task(changed).validation_loss(Copies(), batches, lambda: None))
    assert found == pytest.approx([found[0]] * 4, abs=1e-6)
    assert masked == pytest.approx([masked[0]] * 4, abs=1e-6)
    if batches == 100:
        ids = text.validation.long()
        whole = torch.nn.functional.cross_entropy(model(ids[None, :-1])[0], ids[1:])
        assert found[0] == pytest.approx(whole.item(), abs=1e-6)


def test_bits_per_byte_and_the_perplexity_of_words_are_those_of_the_text_that_was_measured(bigram, monkeypatch):
    """Whatever the windows, also of letters of several bytes."""
    written = "größer als die Maße é " * 40
    text, model = tokenize(written, validation=0.5), bigram().eval()
    model.table = torch.nn.Embedding(text.tokenizer.vocab_size, text.tokenizer.vocab_size)
    for length in (7, 300):
        task = text.task(config(DECODER.replace(max_seq_len=length)))
        loss = task.validation_loss(model, 100, lambda: None)
        found = task.validation_metrics(model, 100, lambda: None)
        said = written[-len(text.validation) + 1 :]
        nats = loss * len(said)
        assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(said.encode()))
        assert math.log(found["word_perplexity"]) == pytest.approx(nats / len(said.split()))


def test_a_text_shorter_than_a_window_is_measured(words):
    text = tokenize(words[:400] + "a key", validation=10 / 405)
    task = text.task(config())
    assert task.validation_loss(build_model(config(), text), 1, lambda: None) > 0


def test_words_of_unseen_tags_and_words_that_do_not_fit_count_as_wrong(tmp_path):
    (tmp_path / "a-train.conllu").write_text(SENTENCE.format("dogs", "run") * 3)
    unseen = SENTENCE.format("dogs", "run").replace("NOUN", "X")
    (tmp_path / "a-dev.conllu").write_text(unseen + SENTENCE.format("dogs", "r" * 60))
    found = load_tags(DataConfig(dataset=str(tmp_path)), 32, "byte_pairs:260")
    assert len(found.training) == 3

    class Oracle(torch.nn.Module):
        """Knows the class of every word, of those that training has."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens, mask, depths, heads):
            noun, verb = found.names.index("NOUN"), found.names.index("VERB")
            right = torch.where(depths == 0, verb, noun)
            return torch.nn.functional.one_hot(right, len(found.names)).float()

    # dogs/X is wrong, run/VERB right, dogs/NOUN right, and the long word right, as its first token fits.
    assert tagging_accuracy(Oracle(), found.validation, 8) == pytest.approx(3 / 4)
    sentences = read_sentences([tmp_path / "a-dev.conllu"])
    short = tokenize_sentences(sentences, found.tokenizer, found.names, 5)
    assert [one.missed for one in short] == [1, 1]
    assert tagging_accuracy(Oracle(), short, 8) == pytest.approx(1 / 4)
    task = found.task(config(ModelConfig.of("tagger", {"max_seq_len": 32})))
    task.validation_loss(Oracle(), 1, lambda: None)
    assert task.validation_left_out == 1


def test_bleu_is_of_all_sentences_also_of_those_that_the_model_cannot_read():
    pytest.importorskip("sacrebleu")
    texts = [("a b c d", "a b c d"), ("a b c d " * 9, "a b c d " * 9)]
    pairs = tokenize_pairs(texts[:1] * 8, texts, tokenizer="word", longest=(8, 8))
    model = ModelConfig.of("rnnsearch", RNN)
    task = pairs.task(config(model, evaluation=EvaluationConfig(bleu_sentences=2)))
    built = build_model(config(model), pairs)
    task.validation_loss(built, 1, lambda: None)
    assert task.validation_left_out == 1
    assert list(pairs.texts) == texts
    assert task.final_metrics(built, lambda: None)["bleu"] < 50


def test_an_evaluation_reads_the_weights_of_dora_as_they_are_now():
    family, made = configured(DECODER, {"vocab_size": 20})
    model = family.build(made)
    adapter = LoraAdapter.fresh(model, AdapterConfig(r=2, lora_alpha=4.0, use_dora=True), modules={})
    adapted, tokens = AdaptedModel(model), torch.arange(12)[None]
    adapted.always(adapter)
    model.add_module("lora", adapter)
    model.train()(tokens)
    with torch.no_grad():
        for name in adapter:
            adapter.of(name).b.normal_()
    after_training = model.eval()(tokens)
    for name in adapter:
        adapter.of(name)._norm = None
    torch.testing.assert_close(model(tokens), after_training, rtol=0, atol=0)


def test_no_end_and_no_blank_appears_within_a_text_that_is_read_in_groups(monkeypatch, tmp_path):
    """A tokenizer that begins texts with a token and a blank, and a text that spells its end token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors

    letters = {token: place for place, token in enumerate(["<s>", "</s>", "\n", "▁", *"ab<>/s"])}
    backend = Backend(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(backend, TokenizerSettings(bos_token="<s>", eos_token="</s>"))
    monkeypatch.setattr("attn_train.tasks.language_modeling.LINES_AT_ONCE", 2)
    monkeypatch.setattr("attn_train.tasks.language_modeling.learned_tokenizer", lambda *_: tokenizer)
    ids = tokenize("a\nb\na</s>b\nab\nb\n", tokenizer="x", validation=0.0).training.tolist()
    assert "".join(tokenizer.token(one) for one in ids) == "<s>▁a\nb\na</s>b\nab\nb\n"
    assert (ids.count(0), ids.count(1)) == (1, 0)


def test_a_tokenizer_that_does_not_know_most_of_the_text_is_refused(tmp_path):
    for name, content in word_tokenizer(["a b c"]).files().items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InvalidValue, match="unknown"):
        tokenize("x y a z " * 30, tokenizer=str(tmp_path))
    assert "25.00% of them unknown" in tokenize("a b x c " * 30, tokenizer=str(tmp_path)).summary


def test_the_share_of_halvings_is_counted_from_the_end_of_the_warm_up():
    from attn_train.optimizer import learning_rate

    fields = {"lr_scheduler_type": "halving", "start_decay_steps": 20, "decay_steps": 10, "learning_rate": 1.0}
    schedule = OptimizerConfig(steps=200, warmup_steps=100, **fields)
    rates = [learning_rate(step, schedule) for step in range(99, 130)]
    assert all(later / earlier in (0.5, 1.0) for earlier, later in pairwise(rates))
