"""Encoders and models with an encoder compute, generate, learn and are saved in transformers as they are without it."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_models.loading import load_model, save_model
from attn_models.loading.encoders import load_classifier, load_masked, save_classifier, save_masked
from attn_models.tokenizers.learned import word_tokenizer

transformers = pytest.importorskip("transformers")

import attn_models.hf  # noqa: E402, F401 -- needs transformers

TOKENIZER = word_tokenizer(["ab cd ef gh ij kl mn op"])
SHARED = {"vocab_size": TOKENIZER.vocab_size, "num_heads": 2, "hidden_size": 16, "max_seq_len": 24}
ENCODER = SHARED | {"num_layers": 2, "intermediate_size": 24, "type_vocab_size": 0}
READS = SHARED | {"max_encoder_len": 16}
STACKED = READS | {"num_layers": 2, "intermediate_size": 24}
RECURRENT = {name: value for name, value in READS.items() if name != "num_heads"} | {"embedding": 8}
SOURCES = {
    "transformer": STACKED,
    "transformer-linear": STACKED | {"decoder": "linear", "encoder": "linformer", "norm_place": "pre"},
    "t5": STACKED | {"head_dim": 8},
    "bottleneck": RECURRENT,
    "rnnsearch": RECURRENT | {"num_heads": 1, "maxout": 8},
    "luong": RECURRENT | {"num_heads": 1},
}
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 6], [9, 5, 8, 0, 0, 0]])
REAL = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
STARTS = torch.tensor([[1, 7, 8], [1, 9, 5]])


def drawn(family, fields):
    torch.manual_seed(0)
    found = installed().models.get(family)
    model = found.build(found.configure(fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    own = drawn(request.param.partition("-")[0], SOURCES[request.param])
    save_model(tmp_path / "own", own, TOKENIZER)
    return own, transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "own").eval()


@torch.no_grad()
def test_translations_are_those_of_the_model_wherever_its_padding_is(source, tmp_path):
    own, model = source
    exact = own(STARTS, TOKENS, REAL.bool())
    left = [torch.stack([rows[0], rows[1].roll(3)]) for rows in (TOKENS, REAL)]
    sides = [dict(zip(("input_ids", "attention_mask"), side, strict=True)) for side in ((TOKENS, REAL), left)]
    for side in sides:
        for cached in (True, False):
            close(model(decoder_input_ids=STARTS, use_cache=cached, **side).logits, exact)
    tokens = STARTS[:, :1]
    for _ in range(6):
        tokens = torch.cat([tokens, own(tokens, TOKENS, REAL.bool())[:, -1:].argmax(-1)], dim=1)
    options = {"max_new_tokens": 6, "do_sample": False, "decoder_input_ids": STARTS[:, :1]}
    model.generation_config.eos_token_id = None
    assert torch.equal(model.generate(**sides[1], **options), tokens)
    beams = [model.generate(**sides[0], num_beams=3, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)
    model.save_pretrained(tmp_path / "saved")
    close(load_model(tmp_path / "saved").model(STARTS, TOKENS, REAL.bool()), exact)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved").eval()
    close(again(TOKENS, REAL, STARTS).logits, exact)


def test_a_translator_learns_from_labels(source):
    own, model = source
    labels = torch.cat([STARTS[:, 1:], torch.tensor([[2], [-100]])], dim=1)
    loss = model(TOKENS, REAL, labels=labels).loss
    logits = own(torch.tensor([[TOKENIZER.bos_id, 7, 8], [TOKENIZER.bos_id, 9, 5]]), TOKENS, REAL.bool())
    close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    close(model(TOKENS, REAL, labels=labels, num_items_in_batch=10).loss, loss * 5 / 10)
    torch.autograd.backward(loss)
    with pytest.raises(Incompatible, match="inputs_embeds"):
        model(TOKENS, REAL, STARTS, inputs_embeds=torch.zeros(2, 6, 16))
    with pytest.raises(InvalidValue, match="decoder_input_ids"):
        model(TOKENS, REAL)


@pytest.mark.parametrize("mechanism", ["sparsemax", "linear", "linformer"])
def test_an_encoder_with_a_head_is_read_and_saved_by_both(mechanism, tmp_path):
    options = {"classes": 3, "mechanism": mechanism}
    kinds = {
        "masked_lm": (transformers.AutoModelForMaskedLM, lambda m, to: save_masked(to, m, TOKENIZER), load_masked),
        "tagger": (
            transformers.AutoModelForTokenClassification,
            lambda m, to: save_classifier(to, m, ["a", "b", "c"], TOKENIZER),
            load_classifier,
        ),
        "text_classifier": (
            transformers.AutoModelForSequenceClassification,
            lambda m, to: save_classifier(to, m, ["a", "b", "c"], TOKENIZER),
            load_classifier,
        ),
    }
    for family, (auto, save, load) in kinds.items():
        own = drawn(family, ENCODER | {n: v for n, v in options.items() if family != "masked_lm" or n != "classes"})
        save(own, tmp_path / family)
        model = auto.from_pretrained(tmp_path / family).eval()
        with torch.no_grad():
            exact = own(TOKENS, REAL.bool())
            found = model(TOKENS, REAL).logits
            close(found if found.ndim == 3 else found[:, None], exact)
            hidden = transformers.AutoModel.from_pretrained(tmp_path / family).eval()(TOKENS, REAL).last_hidden_state
            close(hidden, own.encoder(TOKENS, REAL.bool()))
        labels = TOKENS % 3 if family != "text_classifier" else torch.tensor([0, 2])
        loss = model(TOKENS, REAL, labels=labels).loss
        close(loss, torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten()))
        torch.autograd.backward(loss)
        model.save_pretrained(tmp_path / "saved")
        transformers.AutoTokenizer.from_pretrained(tmp_path / family).save_pretrained(tmp_path / "saved")
        with torch.no_grad():
            close(load(tmp_path / "saved")[0](TOKENS, REAL.bool()), exact)


def test_a_new_head_is_drawn_and_the_encoder_kept(tmp_path):
    own = drawn("masked_lm", ENCODER | {"mechanism": "linear"})
    save_masked(tmp_path / "own", own, TOKENIZER)
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "own", num_labels=5)
    assert model.classifier.weight.shape == (5, 16)
    assert 0 < model.classifier.weight.abs().max() < 1
    assert torch.equal(model.model.embedding.weight, own.encoder.embedding.weight)
