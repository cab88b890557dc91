"""Claims about what attention and models cost: products, weights and remembered bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from attn_core import Capability, Cost, Field, Shape, Slot, StateSpecs, Step, configure, installed
from attn_models.adapters.state_dict import init_empty_weights
from attn_models.decoder.block import Block
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

DEEPSEEK_V3 = {"latent": 512, "rotary_size": 64, "nope_size": 128, "value_size": 128, "query_latent": 1536}


def price(length: int, **sizes: int) -> Cost:
    mha = installed().mechanisms.get("mha")
    return mha.cost(configure(mha, **sizes), Shape(query=length, key=length))


def remembered(name: str, options: dict[str, int], **sizes: int) -> int:
    """Elements that one token leaves in one layer."""
    mechanism = installed().mechanisms.get(name)
    specs: StateSpecs = mechanism.state(configure(mechanism, options, **sizes))
    fields: list[Field] = [field for spec in specs.values() for field in spec.fields.values()]
    return sum(field.bytes("bfloat16") // 2 for field in fields)


@pytest.fixture
def block() -> Block:
    """One block of the course's sizes: as many heads as you like, and a feed-forward four times as wide."""
    torch.manual_seed(0)
    found = Decoder(DecoderConfig(vocab_size=11, max_seq_len=32, hidden_size=24, num_layers=1, num_heads=3)).blocks[0]
    assert isinstance(found, Block)
    return found


def counted(module: nn.Module, rows: torch.Tensor) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(rows)
    return int(counter.get_total_flops())


def products(module: nn.Module, rows: torch.Tensor) -> int:
    """Layers of weights that were multiplied by."""
    called: list[nn.Module] = []
    handles = [
        m.register_forward_hook(lambda m, *_: called.append(m)) for m in module.modules() if isinstance(m, nn.Linear)
    ]
    module(rows)
    for handle in handles:
        handle.remove()
    return len(called)


@pytest.mark.parametrize("length", [2, 16, 31])
def test_cl_26_attention_is_four_products_by_weights_and_a_block_is_six(block: Block, length: int) -> None:
    width, rows = 24, torch.randn(1, length, 24)
    assert products(block.attention, rows) == 4
    assert products(block, rows) == 6
    assert counted(block.attention, rows) == 8 * length * width**2 + 4 * length**2 * width
    assert counted(block, rows) == 8 * length * width**2 + 4 * length**2 * width + 16 * length * width**2


def test_cl_25_more_heads_cost_nothing_at_one_width_and_as_many_times_more_at_one_head_size() -> None:
    shared = {price(100, hidden_size=96, num_heads=heads).flops for heads in (1, 2, 8, 32)}
    assert shared == {8 * 100 * 96**2 + 4 * 100**2 * 96}
    one, six = (price(100, hidden_size=96, num_heads=heads, head_dim=16) for heads in (1, 6))
    assert six.flops == 6 * one.flops
    assert six.parameters == 6 * one.parameters


@pytest.mark.parametrize(("length", "share"), [(64, 1 / 33), (2048, 1 / 2), (2**20, 512 / 513)])
def test_cl_9_pairs_are_n_over_n_and_2_d_of_the_price(length: int, share: float) -> None:
    width = 1024
    cost = price(length, hidden_size=width, num_heads=8, head_dim=128)
    pairs = cost.flops - 8 * length * width**2
    assert pairs == 4 * length**2 * width
    assert pairs / cost.flops == pytest.approx(share)


def test_cl_17_deepseek_v2_remembers_93_percent_less_than_the_67b_model_before_it() -> None:
    v2 = 60 * remembered("mla", {"latent": 512, "rotary_size": 64}, hidden_size=5120, num_heads=128, head_dim=128)
    before = 95 * remembered("gqa", {}, hidden_size=8192, num_heads=64, num_kv_heads=8)
    same_shape = 60 * remembered("mha", {}, hidden_size=5120, num_heads=128, head_dim=128)
    assert 100 * (1 - 6 * v2 / (16 * before)) == pytest.approx(93.34, abs=5e-3)
    assert 100 * (1 - v2 / before) == pytest.approx(82.24, abs=5e-3)
    assert 100 * (1 - v2 / same_shape) == pytest.approx(98.24, abs=5e-3)


def test_cl_18_deepseek_v3_has_671_billion_weights_of_which_a_token_uses_37() -> None:
    """The latent attention is ours; the experts are counted by the report's sizes."""
    mla = installed().mechanisms.get("mla")
    width, layers, dense, experts = 7168, 61, 3, 256
    attention = mla.cost(configure(mla, DEEPSEEK_V3, hidden_size=width, num_heads=128), Shape()).parameters
    wide, expert, router = 3 * width * 18432, 3 * width * 2048, experts * (width + 1)
    around = 2 * 129280 * width + layers * (attention + 2 * width) + width + dense * wide
    total = around + (layers - dense) * ((experts + 1) * expert + router)
    used = around + (layers - dense) * (9 * expert + router)
    assert total == 671_026_419_200
    assert used / 1e9 == pytest.approx(37, abs=1)


def decoder(**fields: object) -> int:
    with init_empty_weights():
        model = Decoder(
            DecoderConfig(**({"vocab_size": 11, "max_seq_len": 8, "num_layers": 1, "num_heads": 3} | fields))
        )  # type: ignore[arg-type]
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("width", [24, 96, 768])
def test_cl_31_swiglu_with_eight_thirds_of_the_width_has_as_many_weights_as_four_times_without_gates(
    width: int,
) -> None:
    gated = decoder(hidden_size=width, feed_forward="swiglu", intermediate_size=8 * width // 3)
    assert gated == decoder(hidden_size=width, feed_forward="gelu", intermediate_size=4 * width)


@pytest.mark.parametrize("width", [3, 64, 1000])
def test_cl_30_rmsnorm_gives_every_token_the_norm_of_the_root_of_the_width(width: int) -> None:
    model = Decoder(
        DecoderConfig(
            vocab_size=11, max_seq_len=8, hidden_size=width, num_layers=1, num_heads=1, norm="rms", norm_eps=1e-12
        )
    )
    block = model.blocks[0].double()
    assert isinstance(block, Block)
    rows = torch.randn(50, width, dtype=torch.float64) * torch.logspace(-2, 3, 50, dtype=torch.float64)[:, None]
    norms = block.entering(rows).norm(dim=-1)
    assert torch.allclose(norms, torch.full_like(norms, width**0.5), rtol=1e-6, atol=0)


def test_cl_42_a_step_costs_the_length_where_keys_are_remembered_and_its_square_where_not() -> None:
    mha = installed().mechanisms.get("mha")
    config = configure(mha, hidden_size=4, num_heads=2)

    def grows(steps: Sequence[Shape | Step]) -> float:
        first, last = (mha.cost(config, step).flops for step in steps)
        return math.log(last / first, 4)

    assert grows([Step(remembered=1023), Step(remembered=4095)]) == pytest.approx(1, abs=0.02)
    assert grows([Shape(query=1024, key=1024), Shape(query=4096, key=4096)]) == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize("name", [mechanism.name for mechanism in installed().mechanisms])
def test_every_number_of_the_memories_that_a_step_reads_is_an_allowed_product(name: str) -> None:
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, mechanism.sketch, hidden_size=16, num_heads=4)
    if not mechanism.can(Capability.CAUSAL) or not mechanism.can(Capability.INCREMENTAL):
        return
    slots = [spec for spec in mechanism.state(config).values() if isinstance(spec, Slot)]
    numbers = [math.prod(field.shape) for spec in slots for field in spec.fields.values() if len(field.shape) >= 3]
    assert mechanism.cost(config, Step(remembered=1000, source=8)).allowed_flops >= 2 * sum(numbers)
