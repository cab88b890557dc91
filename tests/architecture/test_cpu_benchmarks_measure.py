"""What benchmarks of serving count, against counts of the engine and of torch, on a small model."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import workspace
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig

SMALL = {"vocab_size": 64, "max_seq_len": 1024, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "norm": "rms"}
SMALL |= {"feed_forward": "swiglu", "positions": "rotary", "bias": False}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import one another from their folder."""
    monkeypatch.setattr(sys, "path", [str(workspace.ROOT / "benchmarks"), *sys.path])


@pytest.fixture(scope="module")
def loaded() -> SimpleNamespace:
    torch.manual_seed(0)
    config = DecoderConfig.from_plain(SMALL)
    return SimpleNamespace(model=Decoder(config).eval(), tokenizer=None, config=config)


def asked(**more: object) -> argparse.Namespace:
    given = {"streams": 3, "cache": "shared", "repeats": 2, "threads": 1, "arrivals": 2, "model": Path("none")}
    return argparse.Namespace(**(given | more))


def test_a_first_token_comes_with_a_step_of_the_whole_prompt_and_a_token_of_each_stream(
    loaded: SimpleNamespace,
) -> None:
    first_token_cpu = import_module("first_token_cpu")

    engine = first_token_cpu.streaming(loaded, "shared", 3, first_token_cpu.room(asked(), 20))
    before = engine.stats()
    first_token_cpu.first_token_step(engine, loaded, 20, 0)
    after = engine.stats()
    assert after.computed_tokens - before.computed_tokens == 20 + 3
    assert after.generated_tokens - before.generated_tokens == 1 + 3
    assert after.cached_tokens == 0


def test_a_prompt_that_takes_more_than_one_step_is_no_first_token_step(
    loaded: SimpleNamespace,
) -> None:
    first_token_cpu = import_module("first_token_cpu")

    engine = first_token_cpu.streaming(loaded, "shared", 3, first_token_cpu.room(asked(), 20))
    engine._scheduler._max_batched = 8
    with pytest.raises(SystemExit, match="20 tokens was not computed in one step"):
        first_token_cpu.first_token_step(engine, loaded, 20, 0)


def test_parts_of_a_step_are_all_of_it_and_leave_the_model_as_it_was(
    loaded: SimpleNamespace,
) -> None:
    first_token_cpu = import_module("first_token_cpu")

    found = first_token_cpu.steps(loaded, asked(), 16)
    assert sum(found["percent_by_part"].values()) == pytest.approx(100, abs=0.2)
    assert not {"step", "logits", "greedy_tokens"} & set(vars(loaded.model))


def test_attention_with_dropout_is_timed_for_every_system_with_the_mask_of_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropout_cpu = import_module("dropout_cpu")
    if reason := import_module("attn_kernels_cpu.compiling").why_not():
        pytest.skip(reason)
    monkeypatch.setitem(dropout_cpu.SHAPES, "cpu", (2, 2, 9, 8))
    computing = dropout_cpu.systems(2, 8)
    rows = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    found = computing["ours"](*rows)
    torch.testing.assert_close(computing["plain torch, the same mask"](*rows), found)
    torch.testing.assert_close(computing["torch sdpa without dropout"](*rows), computing["ours without dropout"](*rows))
    timed = list(dropout_cpu.rounds(argparse.Namespace(threads=[1], shapes=["cpu"], turns=1)))
    assert {row["system"] for row in timed} == set(computing)
    assert all(row["min"] <= row["ms"] <= row["max"] for row in timed)


def test_each_way_to_choose_tokens_is_timed_in_steps_of_its_own(
    loaded: SimpleNamespace,
) -> None:
    engine_measures, output_processor = import_module("engine_measures"), import_module("attn_engine.output_processor")

    before = output_processor.chosen_tokens
    found = engine_measures.sampling(loaded, "shared", 2)
    assert output_processor.chosen_tokens is before
    assert [row["sampling"] for row in found] == list(engine_measures.SAMPLED)
    assert all(row["step_ms"] > 0 for row in found)
    assert all(0 < row["percent_choosing"] < 100 for row in found[1:])
