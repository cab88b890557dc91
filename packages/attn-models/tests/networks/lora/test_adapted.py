"""Adapters on a model: the outputs are those of merged weights, for every mechanism, in whole and in steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from attn_core import Capability, RaggedBatch, installed
from attn_core.errors import InternalError
from attn_models.decoder.decoder import Decoder
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter, lora_sites, merge_adapter
from attn_models.quantization.quantize import join_projections, quantize_model
from attn_schema.decoder import DecoderConfig
from attn_testing import DictionaryStore
from cases import kind_of
from torch import nn

CAUSAL = sorted(mechanism.name for mechanism in installed().mechanisms if mechanism.can(Capability.CAUSAL))
"""What a decoder can be made of."""


def random_adapter(model: nn.Module, seed: int, *, dora: bool = False) -> LoraAdapter:
    torch.manual_seed(seed)
    config = AdapterConfig(r=3, lora_alpha=6.0, use_dora=dora)
    adapter = LoraAdapter.fresh(model, config, modules={}).double()
    with torch.no_grad():
        for name in adapter:
            layer = adapter.of(name)
            layer.b.normal_(std=0.2)
            if layer.magnitude is not None:
                layer.magnitude.mul_(1 + 0.2 * torch.rand_like(layer.magnitude))
    return adapter.eval().requires_grad_(requires_grad=False)


def decoder(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config).double().eval()


def merged(model: Decoder, adapter: LoraAdapter) -> Decoder:
    changed = copy.deepcopy(model)
    merge_adapter(changed, adapter)
    return changed


TOKENS = torch.arange(24).reshape(2, 12) % 31


@pytest.mark.sweep(lambda mechanism: kind_of(mechanism))
@pytest.mark.parametrize("mechanism", CAUSAL)
def test_whole_sequences_and_steps_are_those_of_merged_weights(
    mechanism: str, tiny: Callable[..., DecoderConfig], stepwise: Callable
) -> None:
    plain = decoder(tiny(mechanism=mechanism, num_layers=1))
    adapter = random_adapter(plain, 1)
    assert len(adapter) >= 3
    expected_model = merged(plain, adapter)
    adapted = AdaptedModel(plain)
    before = plain(TOKENS)
    with torch.no_grad(), adapted.stepping([(adapter, TOKENS.numel())]):
        whole = plain(TOKENS)
        steps = stepwise(plain, [TOKENS[0].tolist()], [[5, 1, 1, 4, 1]])[0]
    expected = expected_model(TOKENS)
    torch.testing.assert_close(whole, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        steps, stepwise(expected_model, [TOKENS[0].tolist()], [[5, 1, 1, 4, 1]])[0], rtol=1e-8, atol=1e-9
    )
    assert (whole - before).abs().max() > 1e-4
    assert torch.equal(plain(TOKENS), before), "outside of using, the base alone computes"


@pytest.mark.parametrize(
    "mechanism", ["gqa", "linear", "retnet", "lightning", "gla", "deltanet", "kda", "gated_deltanet", "mamba2"]
)
def test_adapters_change_layers_that_are_joined_as_they_change_those_apart(
    mechanism: str, tiny: Callable[..., DecoderConfig], stepwise: Callable
) -> None:
    plain = decoder(tiny(mechanism=mechanism, num_layers=1, feed_forward="swiglu"))
    adapter = random_adapter(plain, 1)
    expected, chunks = merged(plain, adapter), [[5, 1, 1, 4, 1]]
    joined = copy.deepcopy(plain)
    join_projections(joined)
    torch.testing.assert_close(joined(TOKENS), plain(TOKENS), rtol=1e-9, atol=1e-10)
    assert set(lora_sites(joined)) == set(lora_sites(plain))
    adapted = AdaptedModel(joined)
    with torch.no_grad(), adapted.stepping([(adapter, TOKENS.numel())]):
        torch.testing.assert_close(joined(TOKENS), expected(TOKENS), rtol=1e-8, atol=1e-9)
        steps = stepwise(joined, [TOKENS[0].tolist()], chunks)[0]
    torch.testing.assert_close(steps, stepwise(expected, [TOKENS[0].tolist()], chunks)[0], rtol=1e-6, atol=1e-7)


def run_step(model: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    store = DictionaryStore(model.state_specs(), "float64")
    for request in range(len(prompts)):
        store.admit(request)
    batch = RaggedBatch.of([len(prompt) for prompt in prompts], [0] * len(prompts), torch.tensor)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    with torch.no_grad():
        return model.logits(model.step(tokens, batch, store.view(batch, list(range(len(prompts))))))


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 1]]


@pytest.mark.sweep(lambda mechanism: kind_of(mechanism))
@pytest.mark.parametrize("mechanism", CAUSAL)
def test_one_step_gives_each_request_what_its_own_adapter_gives_alone(
    mechanism: str, tiny: Callable[..., DecoderConfig]
) -> None:
    model = decoder(tiny(mechanism=mechanism, num_layers=1))
    adapted = AdaptedModel(model)
    if not adapted.mixes:
        return
    first, second = random_adapter(model, 1), random_adapter(model, 2)
    used = [first, None, second, first]
    alone = []
    for prompt, adapter in zip(PROMPTS, used, strict=True):
        with adapted.stepping([(adapter, len(prompt))]):
            alone.append(run_step(model, [prompt]))
    with adapted.stepping([(adapter, len(prompt)) for prompt, adapter in zip(PROMPTS, used, strict=True)]):
        together = run_step(model, PROMPTS)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-10)


def test_softmax_decoders_mix_adapters_and_experts_do_not(tiny: Callable[..., DecoderConfig]) -> None:
    assert AdaptedModel(decoder(tiny(mechanism="gqa", num_kv_heads=2))).mixes
    assert not AdaptedModel(decoder(tiny(num_experts=4, num_experts_per_tok=2, routing="mixtral"))).mixes


FIELDS = (
    {"feed_forward": "swiglu", "norm": "rms"},
    {"feed_forward": "gelu", "bias": True},
    {"num_experts": 4, "num_experts_per_tok": 2, "routing": "mixtral", "feed_forward": "swiglu"},
    {"norm_place": "post"},
)


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("dora", [False, True])
def test_every_kind_of_block_computes_with_merged_weights(
    fields: dict, dora: bool, tiny: Callable[..., DecoderConfig]
) -> None:
    plain = decoder(tiny(**fields))
    adapter = random_adapter(plain, 3, dora=dora)
    expected = merged(plain, adapter)(TOKENS)
    with AdaptedModel(plain).using([(adapter, TOKENS.numel())]):
        torch.testing.assert_close(plain(TOKENS), expected, rtol=1e-8, atol=1e-9)


def test_routers_have_no_adapter_and_every_other_linear_layer_of_the_blocks_has(
    tiny: Callable[..., DecoderConfig],
) -> None:
    model = decoder(tiny(num_experts=2, num_experts_per_tok=1, routing="switch"))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    left = linear - set(lora_sites(model))
    assert left == {f"blocks.{layer}.feed_forward.router.score" for layer in range(2)}


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("dora", [False, True])
def test_packed_weights_take_the_same_adapters(form: str, dora: bool, tiny: Callable[..., DecoderConfig]) -> None:
    model = decoder(tiny(feed_forward="swiglu", norm="rms", hidden_size=32, bias=True)).float()
    adapter = random_adapter(model, 4, dora=dora).float()
    packed = copy.deepcopy(model)
    quantize_model(packed, form)
    # What the packed weights are, on a model with plain ones.
    for name, site in lora_sites(packed).items():
        model.get_submodule(name).weight.data = site.weight().clone()
    model.embedding.weight.data = packed.embedding.table.clone()
    expected = merged(model, copy.deepcopy(adapter))
    adapted, wanted = AdaptedModel(packed), [(adapter, 11)]
    with torch.no_grad(), adapted.stepping(wanted):
        steps = run_step_float(packed)
    base = run_step_float(packed)
    difference = (steps - run_step_float(expected)).abs().max()
    assert difference < (1e-4 if form == "float32" else 0.05)
    assert (steps - base).abs().max() > 4 * difference


def run_step_float(model: Decoder) -> torch.Tensor:
    store = DictionaryStore(model.state_specs(), "float32")
    for request in range(len(PROMPTS)):
        store.admit(request)
    batch = RaggedBatch.of([len(prompt) for prompt in PROMPTS], [0] * len(PROMPTS), torch.tensor)
    tokens = torch.tensor([token for prompt in PROMPTS for token in prompt])
    with torch.no_grad():
        return model.step(tokens, batch, store.view(batch, list(range(len(PROMPTS)))))


def test_rows_that_are_not_those_of_the_step_are_refused_and_never_mixed_up(
    tiny: Callable[..., DecoderConfig],
) -> None:
    model = decoder(tiny())
    adapted = AdaptedModel(model)
    first, second = random_adapter(model, 1), random_adapter(model, 2)
    with pytest.raises(InternalError, match="24 rows"), adapted.using([(first, 3), (second, 2)]):
        model(TOKENS)


def test_a_detached_model_is_as_it_was(tiny: Callable[..., DecoderConfig]) -> None:
    model = decoder(tiny(mechanism="mla"))
    before, adapter = model(TOKENS), random_adapter(model, 5)
    adapted = AdaptedModel(model)
    adapted.always(adapter)
    assert not torch.equal(model(TOKENS), before)
    adapted.detach()
    assert torch.equal(model(TOKENS), before)
