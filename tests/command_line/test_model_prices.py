"""What `attn cost` says of models is the closed form of their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Answer = Callable[..., Any]


def test_a_model_keeps_its_key_value_heads_under_another_mechanism_that_shares_them(answer: Answer) -> None:
    own, rope, mha = (
        answer("cost", "llama-3-8b", *words) for words in ((), ("--attention", "rope"), ("--attention", "mha"))
    )
    grouped = answer("cost", "llama-3-8b", "--attention", "gqa")
    assert grouped["num_kv_heads"] == own["num_kv_heads"] == rope["num_kv_heads"] == 8
    assert grouped["attention_parameters"] == own["attention_parameters"] == 32 * 2 * 4096 * (4096 + 1024)
    assert grouped["attention_prefill_flops"] == own["attention_prefill_flops"]
    assert mha["num_kv_heads"] == 32
    assert answer("cost", "llama-3-8b", "--attention", "mqa")["num_kv_heads"] == 1


@pytest.mark.parametrize(("name", "layers", "width"), [("gpt2-xl", 48, 1600), ("gpt3-175b", 96, 12288)])
def test_projections_of_gpt_have_biases(answer: Answer, name: str, layers: int, width: int) -> None:
    assert answer("cost", name)["attention_parameters"] == layers * (4 * width**2 + 4 * width)


@pytest.mark.parametrize(("name", "layers", "width"), [("bert-base", 12, 768), ("vit-l-16", 24, 1024)])
def test_an_encoder_sees_all_pairs_and_remembers_nothing(answer: Answer, name: str, layers: int, width: int) -> None:
    found = answer("cost", name, "--seq", "100", "--batch", "3")
    assert found["attention_forward_flops"] == 3 * layers * (8 * 100 * width**2 + 4 * 100**2 * width)
    assert not {"cache_bytes", "attention_decode_step_flops", "attention_prefill_flops"} & found.keys()


def test_the_transformer_reads_its_source_once_and_a_step_does_not_project_it_again(answer: Answer) -> None:
    found = answer("cost", "transformer-base", "--seq", "9", "--encoder-len", "50", "--dtype", "float32")
    width, source, tokens = 512, 50, 9
    encoder = 8 * source * width**2 + 4 * source**2 * width
    decoder = 8 * tokens * width**2 + 4 * tokens * (tokens + 1) // 2 * width
    cross = 4 * (tokens + source) * width**2 + 4 * tokens * source * width
    assert found["attention_prefill_flops"] == 6 * (encoder + decoder + cross)
    assert found["attention_decode_step_flops"] == 6 * (
        8 * width**2 + 4 * tokens * width + 4 * width**2 + 4 * source * width
    )
    assert found["cache_bytes"] == 6 * 2 * width * 4 * (tokens + source)


def test_what_has_no_causal_form_is_priced_bidirectional(answer: Answer) -> None:
    found = answer("cost", "gpt2", "--attention", "linformer", "--bidirectional", "--seq", "600", "-o", "rank=16")
    assert found["attention_forward_flops"] == 12 * (8 * 600 * 768**2 + 8 * 600 * 16 * 768)
    assert found["attention_parameters"] == 12 * (4 * 768**2 + 4 * 768 + 2 * 600 * 16)


def test_deepseek_v2_lite_has_one_number_of_active_parameters(answer: Answer) -> None:
    shapes = {row["name"]: row for row in answer("list", "shapes")}
    active = answer("cost", "deepseek-v2-lite")["active_parameters"]
    assert f"a token uses {active / 1e9:.1f} B" in shapes["deepseek-v2-lite"]["summary"]


def test_a_mechanism_without_a_step_of_its_own_decodes_by_computing_everything_again(answer: Answer) -> None:
    found = answer("cost", "gpt2", "--attention", "gat", "--seq", "40")
    assert found["attention_decode_step_flops"] == found["attention_prefill_flops"] > 0
    assert answer("cost", "gpt2", "--seq", "40")["attention_decode_step_flops"] < found["attention_decode_step_flops"]
