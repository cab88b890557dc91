"""Bounds and energy are those by hand, and the units are right."""

from __future__ import annotations

import json

import pytest
from attn_core.errors import InvalidValue, UnknownName
from attn_experiments.machine import GPUS, Bound, Call, DecodeStep, Training, bounds, gpu, prefixed


def test_an_a100_has_108_processors_and_20_megabytes_of_sram():
    assert gpu("a100-40gb").all_sram == 108 * 192 * 1024
    assert gpu("a100-40gb").ridge == pytest.approx(312e12 / 1.555e12)


def test_attention_of_gpt_2_small_is_bound_by_traffic_in_matrices_and_not_in_tiles():
    call = Call(batch=8, tokens=1024, heads=12, size=64)
    assert call.flops == 4 * 8 * 12 * 1024**2 * 64
    # Queries, keys, values and outputs once, scores and weights twice each, two bytes a number.
    assert call.standard_bytes == 2 * (4 * 8 * 12 * 1024 * 64 + 4 * 8 * 12 * 1024**2)
    found = bounds(call, gpu("a100-40gb"))
    matrices, tiles, once = found.values()
    assert matrices.seconds == matrices.traffic > matrices.compute
    assert tiles.seconds < matrices.seconds / 3
    assert once.bytes < tiles.bytes < matrices.bytes
    assert matrices.joules == pytest.approx(400 * call.standard_bytes / 1.555e12)


def test_tiles_that_hold_the_whole_sequence_pass_once():
    call = Call(tokens=128, heads=1, size=16)
    assert call.flash_bytes(10**9) == 2 * (2 + 3) * 128 * 16 + 4 * 128 * 4


def test_training_takes_six_flops_a_parameter_and_token():
    trained = Training(parameters=1e9, tokens=1e9, gpus=2, on=gpu("a100-40gb"), utilisation=0.5)
    assert trained.gpu_hours == pytest.approx(6e18 / (0.5 * 312e12) / 3600)
    assert trained.days == pytest.approx(trained.gpu_hours / 48)
    assert trained.kilowatt_hours(1.0) == pytest.approx(0.4 * trained.gpu_hours)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(UnknownName, match="a100-40gb"):
        gpu("a100-40g")
    with pytest.raises(InvalidValue, match="tokens"):
        Call(tokens=0, heads=1, size=8)
    with pytest.raises(InvalidValue, match="utilisation"):
        Training(parameters=1, tokens=1, gpus=1, on=GPUS["h100"], utilisation=1.5)
    with pytest.raises(InvalidValue, match="training"):
        Training(parameters=0, tokens=1, gpus=1, on=GPUS["h100"])


def test_prefixes_are_decimal():
    assert [prefixed(number) for number in (999, 1000, 1.5e12)] == ["999 ", "1 k", "1.5 T"]


def test_bound_picks_the_longer_of_products_and_traffic():
    on = gpu("h100")
    assert Bound(on.flops, 0, on).seconds == 1
    assert Bound(0, 2 * on.bandwidth, on).seconds == 2


def test_commands_print_for_programs(attn):
    assert json.loads(attn("roofline", "h100", "--json"))["gpu"] == "h100"
    assert json.loads(attn("energy", "--parameters", "1e9", "--train-tokens", "1e9", "--json"))["gpu_hours"] > 0
    assert "bound by" in attn("roofline")
    assert "kWh" in attn("energy")


def test_a_decode_step_of_llama_3_70b_reads_its_cache_and_waits_for_memory():
    step = DecodeStep(batch=8, tokens=1000, heads=64, kv_heads=8, size=128, layers=80, parameters=70e9)
    assert step.cache_bytes == 2_621_440_000
    found = step.bounds(gpu("h100"))
    cache, weights = found.values()
    assert cache.flops / cache.bytes == 8
    assert weights.flops / weights.bytes == 8
    assert all(bound.seconds == bound.traffic for bound in found.values())
    with pytest.raises(InvalidValue, match="num-kv-heads"):
        DecodeStep(batch=1, tokens=1, heads=8, kv_heads=3, size=4)


def test_emissions_are_those_of_the_energy(attn):
    trained = Training(parameters=1e9, tokens=1e9, gpus=2, on=gpu("h100"))
    assert trained.carbon(400) == pytest.approx(0.4 * trained.kilowatt_hours())
    with pytest.raises(InvalidValue, match="--decode"):
        attn("roofline", "--parameters", "1e9")


def test_cl_61_the_share_of_attention_is_that_of_the_layers_own_price():
    from attn_core import Shape, configure, installed

    mechanism = installed().mechanisms.get("gqa")
    sizes = {"hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "causal": False}
    layer = mechanism.cost(configure(mechanism, {}, **sizes), Shape(batch=1, query=1000, key=1000)).flops / 1000
    rest = 2 * 3 * 8192 * 28_672 + 2 * 8192 * 128_256 / 80
    assert 100 * layer / (layer + rest) == pytest.approx(18.6, abs=0.5)
