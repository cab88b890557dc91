"""Every mechanism as an attention implementation of transformers: our layer with what it learns, or refused."""

from __future__ import annotations

import pytest
import torch
from attn_core import Capability, DeclaredMechanism, Rotary, configure, installed
from attn_core.errors import Incompatible, Undeclared
from attn_models import hf

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SMALL = {
    "bigbird": {"block": 1, "random": 1},
    "block_local": {"block": 4},
    "chunk_ring": {"chunk": 3},
    "chunked": {"chunk": 4},
    "dilated_window": {"window": 3},
    "fixed": {"block": 4, "summaries": 1},
    "gemma": {"norm_eps": None, "cap": 3.0},
    "moba": {"block": 2, "top": 2},
    "neighborhood": {"size": 5},
    "quest": {"block": 2, "top": 2},
    "sliding_window": {"window": 3},
    "strided": {"stride": 3},
}
"""Options with which a mechanism differs from softmax attention over a dozen tokens."""
NAMES = [name.rpartition("/")[2] for name in installed().mechanisms.names()]
PROJECTIONS = ("query", "key", "value", "output")


def declared_fit(mechanism):
    """Whether a mechanism is a function of rotated queries, keys and values by its own declarations."""
    if not isinstance(mechanism, DeclaredMechanism) or type(mechanism).build is not DeclaredMechanism.build:
        return False
    if mechanism.only_cross or not mechanism.can(Capability.ROTARY):
        return False
    config = configure(mechanism, SMALL.get(mechanism.name), hidden_size=32, num_heads=4)
    inner, norm = mechanism.inner(config), mechanism.spec(config).norm
    return (inner is None or not inner.reads_rows) and (norm is None or norm.kind == "qk_l2_norm")


FITTING = [name for name in NAMES if declared_fit(installed().mechanisms.get(name))]


def sizes(mechanism):
    found = installed().mechanisms.get(mechanism)
    kv = 1 if mechanism == "mqa" else 2 if found.can(Capability.GROUPED) else 4
    shared = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return found, shared | {"num_attention_heads": 4, "num_key_value_heads": kv, "pad_token_id": 0}


def model_of(mechanism):
    """A llama or, for a mechanism that is not causal, a BERT, with drawn weights and this attention."""
    found, shared = sizes(mechanism)
    implementation = hf.register_mechanism(mechanism, SMALL.get(mechanism), name=f"attn:law_{mechanism}")
    if found.can(Capability.CAUSAL):
        kind, config = transformers.AutoModelForCausalLM, transformers.LlamaConfig(**shared)
    else:
        kind, config = transformers.AutoModelForMaskedLM, transformers.BertConfig(**shared, hidden_dropout_prob=0.0)
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name.lower()), std=0.3)
    return model


def attention_of(model):
    llama = model.config.model_type == "llama"
    return model.model.layers[1].self_attn if llama else model.bert.encoder.layer[1].attention.self


def ours_for(model, mechanism):
    """Our layer with the projections and learned weights of the model's second attention module."""
    found, shared = sizes(mechanism)
    theirs = attention_of(model)
    common = {"hidden_size": 32, "num_heads": 4, "output_bias": False}
    if found.can(Capability.CAUSAL):
        common |= {"num_kv_heads": shared["num_key_value_heads"], "rotary": Rotary(base=10000.0)}
    else:
        common |= {"bias": True, "layer": 1}
    layer = found.build(configure(found, SMALL.get(mechanism), **common)).eval()
    output = theirs.o_proj.weight if hasattr(theirs, "o_proj") else torch.eye(32)
    state = {name: rows for name, rows in layer.state_dict().items() if name.partition(".")[0] not in PROJECTIONS}
    assert state.keys() == dict(theirs.mechanism.layer.state_dict() if state else {}).keys()
    state = {"output.weight": output} | (theirs.mechanism.layer.state_dict() if state else {})
    for name in PROJECTIONS[:3]:
        other = getattr(theirs, f"{name[0]}_proj" if hasattr(theirs, "o_proj") else name)
        state |= {f"{name}.{part}": rows for part, rows in other.state_dict().items()}
    layer.load_state_dict({name: rows for name, rows in state.items() if name in layer.state_dict()})
    return layer


@pytest.mark.parametrize("mechanism", FITTING)
def test_a_models_attention_is_our_layer_with_its_projections_and_learned_weights(mechanism):
    model = model_of(mechanism)
    caught = {}
    attention_of(model).register_forward_hook(
        lambda _, args, named, out: caught.update(rows=(args or (named["hidden_states"],))[0], out=out[0]),
        with_kwargs=True,
    )
    with torch.inference_mode():
        model(torch.randint(1, 61, (2, 13)))
        expected = ours_for(model, mechanism)(caught["rows"])
    torch.testing.assert_close(caught["out"], expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("mechanism", FITTING)
def test_cached_steps_and_padding_change_nothing_or_are_refused(mechanism):
    model, (found, _) = model_of(mechanism), sizes(mechanism)
    tokens, keep = torch.randint(1, 61, (1, 9)), torch.tensor([[1] * 9 + [0] * 3])
    padded = {"right": (torch.nn.functional.pad(tokens, (0, 3)), keep)}
    padded["left"] = padded["right"][0].roll(3, 1), keep.roll(3, 1)
    with torch.inference_mode():
        whole = model(tokens).logits
        if found.can(Capability.CAUSAL):
            past = model(tokens[:, :4]).past_key_values
            steps = [model(tokens[:, at : at + 1], past_key_values=past).logits for at in range(4, 9)]
            torch.testing.assert_close(torch.cat(steps, 1), whole[:, 4:], rtol=0, atol=1e-4)
        for side, (rows, mask) in padded.items():
            places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
            if side == "left" and found.counts_from_start:
                with pytest.raises(Incompatible, match="padding must come after"):
                    model(rows, attention_mask=mask, **places)
            else:
                found_there = model(rows, attention_mask=mask, **places).logits[mask.bool()]
                torch.testing.assert_close(found_there, whole[0], rtol=0, atol=1e-4, msg=side)


def config_of(mechanism):
    found, shared = sizes(mechanism)
    kv = shared["num_key_value_heads"] if found.can(Capability.CAUSAL) else None
    return configure(found, SMALL.get(mechanism), hidden_size=32, num_heads=4, num_kv_heads=kv)


def learned(mechanism):
    """The parameters of our layer besides its projections."""
    layer = sizes(mechanism)[0].build(config_of(mechanism))
    return [name for name, _ in layer.named_parameters() if name.partition(".")[0] not in PROJECTIONS]


LEARNING = [name for name in FITTING if learned(name)]


@pytest.mark.parametrize("mechanism", LEARNING)
def test_what_is_learned_is_trained_saved_loaded_and_else_begins_as_in_our_layer(mechanism, tmp_path):
    model, name = model_of(mechanism).train(), f"attn:law_{mechanism}"
    tokens = torch.randint(1, 61, (2, 13))
    model(tokens, labels=tokens).loss.backward()
    own = {name: weight for name, weight in model.named_parameters() if ".mechanism." in name}
    assert all(weight.grad.abs().max() > 0 for weight in own.values()), own.keys()
    with torch.inference_mode():
        expected = model.eval()(tokens).logits
    model.save_pretrained(tmp_path / "whole")
    kind = transformers.AutoModelForCausalLM
    loaded, told = kind.from_pretrained(tmp_path / "whole", attn_implementation=name, output_loading_info=True)
    assert not any(told.values()), told
    with torch.inference_mode():
        assert torch.equal(loaded.eval()(tokens).logits, expected)
    plain = kind.from_pretrained(tmp_path / "whole")
    with pytest.raises(Incompatible, match="learned weights, which a model gets when it is built"):
        plain.set_attn_implementation(name) or plain(tokens)
    plain.save_pretrained(tmp_path / "plain")
    fresh = attention_of(kind.from_pretrained(tmp_path / "plain", attn_implementation=name)).mechanism.layer
    layers = [sizes(mechanism)[0].build(config_of(mechanism)) for _ in range(20)]
    for part, weight in fresh.named_parameters():
        drawn = torch.stack([layer.get_parameter(part).detach() for layer in layers])
        spread = 6 * drawn.std() if drawn.std() > 0 else 1e-6
        assert (weight - drawn.mean()).abs().max() <= spread, part


@pytest.mark.parametrize("mechanism", [name for name in NAMES if name not in FITTING])
def test_what_is_no_function_of_rotated_queries_keys_and_values_is_refused_with_the_reason(mechanism):
    with pytest.raises(Incompatible, match=mechanism):
        hf.register_mechanism(mechanism)


def test_a_mechanism_without_causal_form_is_refused_in_a_causal_model():
    model = model_of("gqa")
    model.set_attn_implementation(hf.register_mechanism("bigbird", name="attn:both_ways"))
    with pytest.raises(Undeclared, match="causal"):
        model(torch.randint(1, 61, (1, 5)))
