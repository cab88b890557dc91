"""CL-32: a mixture of experts has the weights of all its feed-forwards and computes with a few."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_models.adapters.state_dict import init_empty_weights
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import build_feed_forward
from attn_models.decoder.mixture_of_experts import active_parameters
from attn_schema.decoder import DecoderConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

WIDTH, HIDDEN, TOKENS = 12, 20, 17


def feed_forward(**mixture: int) -> tuple[DecoderConfig, nn.Module]:
    """The feed-forward of a decoder of one layer, gated, with random weights."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=9,
        max_seq_len=8,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=2,
        feed_forward="swiglu",
        intermediate_size=HIDDEN,
        **mixture,
    )
    found = Decoder(config).blocks[0].feed_forward
    assert isinstance(found, nn.Module)
    return config, found


def counted(module: nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(torch.randn(TOKENS, WIDTH))
    return int(counter.get_total_flops())


def weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 1), (4, 3), (8, 2)])
def test_cl_32_a_mixture_has_the_weights_of_all_experts_and_computes_with_the_chosen(experts: int, chosen: int) -> None:
    config, mixture = feed_forward(num_experts=experts, num_experts_per_tok=chosen)
    one, router = build_feed_forward(config), WIDTH * experts
    assert weights(mixture) == experts * weights(one) + router
    assert counted(mixture) == chosen * counted(one) + 2 * TOKENS * router


def test_cl_32_mixtral_has_3_6_times_the_weights_that_a_token_uses() -> None:
    shape = installed().shapes.get("mixtral-8x7b")
    config = DecoderConfig(
        vocab_size=shape.vocab_size,
        max_seq_len=64,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        mechanism="gqa",
        intermediate_size=shape.intermediate_size,
        feed_forward="swiglu",
        norm="rms",
        positions="rotary",
        tie_word_embeddings=False,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
    )
    with init_empty_weights():
        model = Decoder(config)
    assert (weights(model), active_parameters(model)) == (shape.parameters, shape.active_parameters)
    assert weights(model) / active_parameters(model) == pytest.approx(46.7 / 12.9, abs=0.01)
