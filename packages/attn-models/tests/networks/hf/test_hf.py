"""Mechanisms inside transformers: what models of ours compute, with masks, padding and caches of transformers'."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models import hf
from attn_models.decoder.decoder import Decoder
from attn_models.hf import MechanismAttention
from attn_models.loading import load_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def names():
    return hf.register()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.3)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def theirs(folder, implementation):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()


def ours(folder, mechanism):
    """The same weights in a decoder of ours whose layers compute another mechanism."""
    loaded = load_model(folder).model
    plain = loaded.config.plain() | {"mechanism": mechanism, "options": {}}
    model = Decoder(type(loaded.config).from_plain(plain)).eval()
    model.load_state_dict(loaded.state_dict())
    return model


def test_what_fits_is_registered_and_nothing_else(names):
    assert {"attn:mha", "attn:gqa", "attn:sparsemax", "attn:sliding_window", "attn:alibi", "attn:softmax_one"} <= set(
        names
    )
    assert not {"attn:cross", "attn:qk_norm", "attn:linear", "attn:mla"} & set(names)


@pytest.mark.parametrize("mechanism", ["gqa", "sparsemax", "sliding_window", "softmax_one", "sigmoid", "soft_cap"])
def test_logits_are_those_of_our_decoder_on_the_same_weights(names, folder, mechanism):
    tokens = torch.randint(1, 61, (2, 20))
    with torch.inference_mode():
        got = theirs(folder, f"attn:{mechanism}")(tokens).logits
        torch.testing.assert_close(got, ours(folder, mechanism)(tokens), rtol=0, atol=1e-4)


def test_softmax_is_transformers_own(names, folder):
    tokens = torch.randint(1, 61, (2, 20))
    with torch.inference_mode():
        expected = theirs(folder, "sdpa")(tokens).logits
        torch.testing.assert_close(theirs(folder, "attn:gqa")(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["attn:sparsemax", "attn:gqa", "attn:alibi", "attn:sliding_window"])
def test_no_token_sees_what_comes_after_it(names, folder, implementation):
    model = theirs(folder, implementation)
    tokens = torch.randint(1, 61, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 5
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits[:, :8], model(changed).logits[:, :8])


def test_registering_only_the_function_would_lose_causality_or_be_refused(folder):
    """Transformers builds no mask for an implementation that it knows no masks of; ours then says so."""

    def naive(module, query, key, value, attention_mask, scaling=None, **words):
        assert attention_mask is None
        key, value = (rows.repeat_interleave(2, 1) for rows in (key, value))
        weights = (query @ key.transpose(2, 3) * scaling).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("half_registered", naive)
    transformers.AttentionInterface.register("half_registered_sparsemax", sparsemax_alone())
    tokens, changed = torch.randint(1, 61, (1, 12)), torch.full((1, 12), 5)
    changed[0, :8] = tokens[0, :8]
    model = theirs(folder, "half_registered")
    with torch.inference_mode():
        assert not torch.allclose(model(tokens).logits[:, :8], model(changed).logits[:, :8])
        with pytest.raises(Incompatible, match="no mask"):
            theirs(folder, "half_registered_sparsemax")(tokens)


def sparsemax_alone():
    from attn_core import installed

    return MechanismAttention(installed().mechanisms.get("sparsemax"), {})


@pytest.mark.parametrize("implementation", ["attn:gqa", "attn:sparsemax", "attn:alibi", "attn:sliding_window"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_decoding_makes_the_tokens_that_whole_sequences_make(names, folder, implementation, cache):
    model = theirs(folder, implementation)
    prompt = torch.randint(1, 61, (2, 7))
    made = model.generate(prompt, max_new_tokens=10, do_sample=False, cache_implementation=cache)
    whole = prompt
    with torch.inference_mode():
        for _ in range(10):
            whole = torch.cat([whole, model(whole).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, whole)


SMALL = {"block_local": {"block": 4}, "chunked": {"chunk": 4}, "fixed": {"block": 4, "summaries": 1}}
"""Mechanisms whose blocks are counted from the first token."""


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mechanism", ["sparsemax", "alibi", *SMALL])
def test_padding_changes_nothing(folder, mechanism, side):
    model = theirs(folder, hf.register_mechanism(mechanism, SMALL.get(mechanism), name=f"attn:small_{mechanism}"))
    tokens = torch.randint(1, 61, (1, 6))
    padding = torch.zeros(1, 3, dtype=torch.int64)
    padded = torch.cat([padding, tokens] if side == "left" else [tokens, padding], 1)
    keep = (padded > 0).long()
    with torch.inference_mode():
        alone = model(tokens).logits
        got = model(padded, attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0)).logits[keep.bool()]
    torch.testing.assert_close(got, alone[0], rtol=0, atol=1e-5)


def test_the_models_own_window_and_cap_hold_as_well(names, tmp_path):
    config = transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=3.0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(1, 61, (1, 15))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(tmp_path, "attn:gqa")(tokens).logits, model(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mechanism", ["strided", *SMALL])
def test_a_cache_without_the_first_tokens_is_read_right_or_refused(mechanism):
    options = SMALL.get(mechanism, {"stride": 3})
    config = transformers.MistralConfig(**SIZES, sliding_window=5)
    model, tokens = transformers.MistralForCausalLM(config).eval(), torch.randint(1, 61, (1, 12))
    model.set_attn_implementation(hf.register_mechanism(mechanism, options, name=f"attn:cached_{mechanism}"))
    with torch.inference_mode():
        whole, first = model(tokens, use_cache=False).logits[:, -1:], model(tokens[:, :-1])
        if mechanism in SMALL:
            with pytest.raises(Incompatible, match="counts positions from the first token"):
                model(tokens[:, -1:], past_key_values=first.past_key_values)
        else:
            found = model(tokens[:, -1:], past_key_values=first.past_key_values).logits
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_an_encoder_sees_both_ways(names):
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertModel(config).eval()
    tokens, keep = torch.randint(1, 61, (2, 9)), torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    with torch.inference_mode():
        expected = model(tokens, attention_mask=keep).last_hidden_state[keep.bool()]
        model.set_attn_implementation("attn:mha")
        got = model(tokens, attention_mask=keep).last_hidden_state[keep.bool()]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def gradients(model, tokens):
    """Of the loss of the next token, by name; of transformers' own loss for a model of theirs."""
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_of_softmax_are_those_of_transformers_own_attention(names, folder):
    tokens = torch.randint(1, 61, (2, 9))
    expected = gradients(theirs(folder, "eager").double().train(), tokens)
    found = gradients(theirs(folder, "attn:gqa").double().train(), tokens)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6, msg=name)


def test_gradients_of_another_distribution_are_finite_differences(names, folder):
    """Along its gradient the loss changes by the norm of it; norms of transformers are in float32."""
    model, tokens = theirs(folder, "attn:sparsemax").double().train(), torch.randint(1, 61, (2, 9))
    weights = dict(model.named_parameters())

    def loss():
        logits = model(tokens).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    for name in (name for name in weights if ".self_attn." in name):
        (slope,) = torch.autograd.grad(loss(), [weights[name]])
        norm = slope.norm()
        assert norm > 1e-6, name
        with torch.no_grad():
            ends = []
            for step in (1e-3, -2e-3):
                weights[name].add_(slope / norm, alpha=step)
                ends.append(loss())
            weights[name].add_(slope / norm, alpha=1e-3)
        assert ((ends[0] - ends[1]) / 2e-3).item() == pytest.approx(norm.item(), rel=1e-2), name


def test_options_and_names_are_the_users():
    assert hf.register_mechanism("sliding_window", {"window": 3}, name="attn:near") == "attn:near"
    with pytest.raises(UnknownName, match="window"):
        hf.register_mechanism("sliding_window", {"windw": 3})
    with pytest.raises(InvalidValue, match="window"):
        hf.register_mechanism("sliding_window", {"window": 0})
    with pytest.raises(UnknownName, match="sparsemax"):
        hf.register_mechanism("sparsmax")
    with pytest.raises(Incompatible, match="cannot name"):
        hf.register_mechanism("mha", name="someone/attention")


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [
        ("qk_norm", "normalises queries and keys before rotary positions"),
        ("gated", "needs hidden states"),
        ("nope", "does not support rotary positions, which models apply before"),
        ("positions_added", "computes more than its score, mask and distribution"),
        ("dependency_depth", "computes more than its score, mask and distribution"),
    ],
)
def test_what_the_interface_has_no_place_for_is_refused_and_not_offered_as_plain_attention(mechanism, said):
    with pytest.raises(Incompatible, match=said):
        hf.register_mechanism(mechanism)
    assert f"attn:{mechanism}" not in hf.register()


def test_a_model_that_needs_more_than_a_mechanism_gives_is_refused(names, folder):
    model = theirs(folder, "attn:gqa")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with pytest.raises(Incompatible, match="not made of causality, a window and padding"):
        model(torch.randint(1, 61, (1, 7)), position_ids=positions, use_cache=False)


def test_a_models_dropout_acts_in_training_by_torchs_seed(names, folder):
    model, tokens = theirs(folder, "attn:gqa"), torch.randint(1, 61, (1, 7))
    expected = model.eval()(tokens).logits
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(model.eval()(tokens).logits, expected)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model.train()(tokens).logits)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(Incompatible, match="set by the model's config"):
        hf.register_mechanism("gqa", {"dropout": 0.1}, name="attn:dropping")
