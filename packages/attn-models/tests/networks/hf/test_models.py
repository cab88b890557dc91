"""Decoders as models of transformers compute, generate, learn and are saved as they are without it."""

from __future__ import annotations

import pytest
import torch
from attn_core import Capability, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer

transformers = pytest.importorskip("transformers")

from attn_models import hf  # noqa: E402 -- needs transformers

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
SIZES = {"max_seq_len": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "positions": "learned"}
CAUSAL = sorted(item.name for item in installed().mechanisms if item.can(Capability.CAUSAL))
QUICK = {"mha", "linear", "sliding_window", "mla", "h2o", "lstmn", "path"} & set(CAUSAL)
"""Keys and values, states of fixed size, windows, latents, dropped rows and whole sequences."""


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in CAUSAL])
def folder(request, tmp_path):
    return written(tmp_path / "own", request.param)


def written(folder, mechanism, **fields):
    torch.manual_seed(0)
    family = installed().models.get("decoder")
    config = family.configure({**SIZES, "vocab_size": TOKENIZER.vocab_size, "mechanism": mechanism, **fields})
    model = family.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return save_model(folder, model, TOKENIZER)


def read(folder, kind=transformers.AutoModelForCausalLM):
    return kind.from_pretrained(folder).eval()


@torch.no_grad()
def test_logits_generation_and_padding_are_those_of_the_decoder(folder):
    model, own = read(folder), load_model(folder).model
    tokens = torch.tensor([TOKENIZER.encode("the quick"), TOKENIZER.encode("brown fox")])
    exact = own(tokens)
    for cached in (False, True):
        torch.testing.assert_close(model(tokens, use_cache=cached).logits, exact, atol=2e-5, rtol=0)
        for hidden in (slice(0, 3), slice(6, 9)):
            real = torch.ones_like(tokens)
            real[0, hidden] = 0
            found = model(tokens, attention_mask=real, use_cache=cached).logits[0][real[0].bool()]
            torch.testing.assert_close(found, own(tokens[:1, real[0].bool()])[0], atol=2e-5, rtol=0)
    greedy = tokens
    for _ in range(5):
        greedy = torch.cat([greedy, own(greedy)[:, -1:].argmax(-1)], dim=1)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), greedy)
    beams = [model.generate(tokens, num_beams=3, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)


def test_a_cache_grows_with_its_sequences(tmp_path):
    model = read(written(tmp_path / "own", "mha"))
    tokens = torch.tensor([TOKENIZER.encode("the quick brown fox " * 4)])
    with torch.no_grad():
        whole, cache, parts = model(tokens, use_cache=False).logits, None, []
        for piece in tokens.split([7, 1, 40, 32], dim=1):
            found = model(piece, past_key_values=cache, use_cache=True)
            cache, parts = found.past_key_values, [*parts, found.logits]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=0)
        with pytest.raises(InvalidValue, match="context of 96"):
            model(tokens[:, :20], past_key_values=cache, use_cache=True)


def test_what_learns_is_saved_and_read_by_both(tmp_path):
    model = read(written(tmp_path / "own", "gqa", num_kv_heads=1, positions="rotary")).train()
    tokens = torch.tensor([TOKENIZER.encode("the quick brown fox")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    model.eval().save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        logits = model(tokens).logits
        assert torch.equal(read(tmp_path / "saved")(tokens).logits, logits)
        torch.testing.assert_close(load_model(tmp_path / "saved").model(tokens), logits, atol=2e-5, rtol=0)


def test_recomputed_blocks_give_the_same_gradients(tmp_path):
    tokens = torch.tensor([TOKENIZER.encode("the quick brown fox")])
    found = []
    for every in (0, 1, 2):
        model = read(written(tmp_path / "own", "mha")).train()
        if every:
            model.gradient_checkpointing_enable(every_n_layers=every)
        torch.autograd.backward(model(tokens, labels=tokens).loss)
        found.append([parameter.grad for parameter in model.parameters()])
        assert model.is_gradient_checkpointing is bool(every)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two)


def test_a_new_model_from_a_config_has_weights_that_were_drawn():
    torch.manual_seed(0)
    config = hf.AttnConfig(decoder={**SIZES, "vocab_size": 27, "mechanism": "mha"})
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert 0.01 < model.model.embedding.weight.std() < 0.1
    assert config.hidden_size == 32
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_a_classifier_reads_the_last_token_that_is_not_padding(tmp_path):
    model = read(written(tmp_path / "own", "linear"), transformers.AutoModelForSequenceClassification)
    tokens = torch.tensor([TOKENIZER.encode("the quick")])
    padded, real = torch.nn.functional.pad(tokens, (0, 3)), torch.nn.functional.pad(torch.ones_like(tokens), (0, 3))
    with torch.no_grad():
        alone = model(tokens).logits
        torch.testing.assert_close(model(padded, attention_mask=real).logits, alone)
        plain = read(tmp_path / "own", transformers.AutoModel)(tokens).last_hidden_state
        assert torch.equal(plain, load_model(tmp_path / "own").model.hidden(tokens))
    assert model(tokens, labels=torch.tensor([1])).loss.requires_grad


@pytest.mark.parametrize("mechanism", ["mha", "linear"])
@torch.no_grad()
def test_documents_end_to_end_do_not_see_each_other(mechanism, tmp_path):
    model = read(written(tmp_path / "own", mechanism))
    one, two = (torch.tensor([TOKENIZER.encode(text)]) for text in ("the quick", "fox"))
    places = torch.tensor([[*range(one.shape[1]), *range(two.shape[1])]])
    both = model(torch.cat([one, two], dim=1), position_ids=places).logits
    alone = torch.cat([model(one).logits, model(two).logits], dim=1)
    torch.testing.assert_close(both, alone, atol=2e-5, rtol=0)
    counted = model(one, position_ids=torch.arange(one.shape[1])[None], token_type_ids=torch.zeros_like(one))
    torch.testing.assert_close(counted.logits, model(one).logits, atol=2e-5, rtol=0)
    with pytest.raises(InvalidValue, match="position_ids"):
        model(one, position_ids=torch.arange(one.shape[1])[None] + 1)
    with pytest.raises(InvalidValue, match="position_ids"):
        model(one.repeat(2, 1), position_ids=places[:, -one.shape[1] :])


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    model = read(written(tmp_path / "own", "mha"))
    tokens = torch.tensor([TOKENIZER.encode("the")])
    with pytest.raises(Incompatible, match="inputs_embeds"):
        model(tokens, inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(Incompatible, match="cu_seq_lens_q"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 3]))
    with pytest.raises(InvalidValue, match="attention_mask"):
        model(tokens, attention_mask=torch.ones(1, 1, 3, 3))
    with pytest.raises(InvalidValue, match="hidden_size"):
        hf.AttnConfig(decoder={**SIZES, "vocab_size": 27}, hidden_size=16)
