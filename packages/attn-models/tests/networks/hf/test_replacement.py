"""What if a model of transformers had another attention: what is kept, what is drawn, and that both are said."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.loading import load_model

transformers = pytest.importorskip("transformers")

from attn_models import hf  # noqa: E402 -- needs transformers

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None}
TOKENS = torch.arange(1, 21).view(2, 10)


def made(kind, **others):
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**SIZES, **others)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.3)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("kind", "mechanism"), [("Llama", "gqa"), ("Llama", "mha"), ("Qwen3", "qk_norm")])
def test_a_mechanism_that_is_the_models_own_changes_nothing(kind, mechanism):
    old = made(kind, **({"head_dim": 8} if kind == "Qwen3" else {}))
    model, initialised, dropped, without_rotary = hf.replace(old, mechanism)
    assert (initialised, dropped, without_rotary) == ([], [], False)
    torch.testing.assert_close(model(TOKENS).logits, old(TOKENS).logits, atol=1e-4, rtol=0)
    greedy = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    assert torch.equal(model.generate(TOKENS, **greedy), old.generate(TOKENS, **greedy))


def test_one_layer_has_another_mechanism_which_is_trained_saved_and_read(tmp_path):
    old = made("Llama")
    model, initialised, dropped, without_rotary = hf.replace(old, "gated_deltanet", layers=[1])
    assert without_rotary
    assert initialised
    assert all(name.startswith("blocks.1.attention.") for name in (*initialised, *dropped))
    assert model.model.layer_mechanisms() == {"blocks.0": "gqa", "blocks.1": "gated_deltanet"}
    assert torch.equal(model.model.blocks[0].attention.query.weight, old.model.layers[0].self_attn.q_proj.weight)
    torch.autograd.backward(model.train()(TOKENS, labels=TOKENS).loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits, expected)
        torch.testing.assert_close(load_model(tmp_path).model(TOKENS), expected, atol=2e-5, rtol=0)
        again = hf.replace(model, "gqa", layers=[1])
    assert sorted(again.dropped) == sorted(set(initialised) - set(again.initialised))


def test_parameters_that_find_no_place_are_named():
    dropped = hf.replace(made("Qwen3", head_dim=8), "gqa").dropped
    assert dropped == [f"blocks.{layer}.attention.norm.{part}_gain" for layer in (0, 1) for part in ("key", "query")]


def test_what_cannot_be_replaced_is_refused_by_name():
    with pytest.raises(InvalidValue, match="layers"):
        hf.replace(made("Llama"), "mha", layers=[2])
    with pytest.raises(Incompatible, match="causal"):
        hf.replace(made("Llama"), "coverage")
