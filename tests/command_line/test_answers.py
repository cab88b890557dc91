"""What `attn` answers when everything is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig

Answer = Callable[..., Any]


def test_the_cache_of_llama_3_70b_weighs_what_its_eight_key_value_heads_say(answer: Answer) -> None:
    size = ("cost", "llama-3-70b", "--batch", "8", "--seq", "1000", "--dtype", "bf16")
    assert answer(*size)["cache_bytes"] == 2_621_440_000
    assert answer(*size, "--num-kv-heads", "64")["cache_bytes"] == 20_971_520_000


def test_a_cache_of_fewer_bits_is_priced_by_its_own_formula(answer: Answer) -> None:
    size = ("cost", "llama-3-70b", "--batch", "8", "--seq", "1000", "--dtype", "bf16")
    assert answer(*size, "--kv-cache", "shared")["cache_bytes"] == 2_621_440_000
    assert answer(*size, "--kv-cache", "int8")["cache_bytes"] == 80 * 8 * 1000 * 2 * 8 * (128 + 2)
    assert answer(*size, "--kv-cache", "int4")["cache_bytes"] == 80 * 8 * 1000 * 2 * 8 * (64 + 4 * 4)


def test_layers_that_share_keys_and_values_are_priced_once(answer: Answer) -> None:
    size = ("cost", "llama-3-8b", "--seq", "100", "--dtype", "bf16")
    whole, pairs, upper = answer(*size), answer(*size, "--kv-sharing", "cla:2"), answer(*size, "--kv-sharing", "yoco")
    assert (pairs["layers_with_own_keys"], upper["layers_with_own_keys"]) == (16, 17)
    assert pairs["cache_bytes"] * 2 == whole["cache_bytes"]
    assert upper["cache_bytes"] * 32 == whole["cache_bytes"] * 17
    assert whole["attention_parameters"] - pairs["attention_parameters"] == 16 * 2 * 4096 * 1024
    assert whole["attention_prefill_flops"] - pairs["attention_prefill_flops"] == 16 * 2 * 2 * 4096 * 1024 * 100


def test_the_cache_of_another_mechanism_at_the_same_size_is_priced_too(answer: Answer) -> None:
    size = ("cost", "llama-3-70b", "--batch", "1", "--dtype", "bf16")
    short, long = (answer(*size, "--seq", seq, "--attention", "linear")["cache_bytes"] for seq in ("10", "100000"))
    assert short == long == 80 * 64 * (128 * 128 + 128) * 4  # float32 sums, whatever the length
    assert answer(*size, "--seq", "1", "--attention", "mqa")["cache_bytes"] == 80 * 2 * 128 * 2


def test_every_mechanism_is_listed_with_its_paper_and_shows_itself(answer: Answer) -> None:
    rows = {row["name"]: row for row in answer("list", "mechanisms")}
    first = {
        "mha",
        "gqa",
        "mqa",
        "sliding_window",
        "coverage",
        "alibi",
        "rope",
        "additive",
        "general",
        "sparsemax",
        "linear",
    }
    assert first <= rows.keys()
    assert all(row["paper"] and row["package"] for row in rows.values())
    shown = answer("show", "gqa", "--num-kv-heads", "2", "--seq", "100")
    assert shown["state_bytes"] == 100 * 2 * 2 * 64 * 4


def test_the_kernel_that_runs_is_named_and_a_refusal_says_which_field(answer: Answer) -> None:
    fused = answer("explain", "gqa", "--num-kv-heads", "2")
    assert [row["verdict"] for row in fused][:2] == ["runs", "would accept"]
    assert fused[0]["name"] == "torch_sdpa"
    refused = {row["name"]: row["reasons"] for row in answer("explain", "sparsemax")}
    assert "distribution" in refused["torch_sdpa"]


def test_who_would_meet_rows_where_a_cache_keeps_them_is_answered_too(answer: Answer) -> None:
    *kernels, others = answer("explain", "gqa", "--num-kv-heads", "2", "--rows", "int8")
    assert {row["name"]: row["reasons"] for row in kernels}["triton_paged"]
    assert "not attend_paged" in others["reasons"]
    assert "torch_sdpa" in others["reasons"]


def test_a_mechanism_that_computes_itself_says_so_and_for_which_part(answer: Answer) -> None:
    alone, step, mixed = answer("explain", "path")
    assert (step["part"], step["name"], step["verdict"]) == ("decode step", "CUDA graph", "runs eagerly")
    assert (mixed["part"], mixed["name"], mixed["verdict"]) == ("step with prompts", "CUDA graph", "runs eagerly")
    assert (alone["part"], alone["name"], alone["verdict"]) == ("attention", "its own module", "runs")
    runs = {row["part"]: row["name"] for row in answer("explain", "nsa") if row["verdict"] == "runs"}
    expected = {
        "window": "torch_sdpa",
        "selected blocks": "selected_blocks_whole",
        "compressed blocks": "its own module",
    }
    assert runs == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "sliding_windo"), "sliding_window"),
        (("cost", "llama-3-7b"), "llama-3-70b"),
        (("show", "gqa", "--num-kv-heads", "3"), "kv"),
        (("show", "mha", "--option", "window=3"), "window"),
        (("show", "mha", "--hidden-size", "10", "--num-heads", "3"), "10"),
        (("cost", "llama-3-70b", "--dtype", "bf17"), "bf16"),
        (("cost", "llama-3-70b", "--kv-sharing", "cla:x"), "cla:N"),
        (("explain", "lstmn", "--rows", "plain"), "gather"),
        (("explain", "gqa", "--rows", "int3"), "int4"),
        (("explain", "gqa", "--rows", "int4", "--training"), "serving"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_that_says_what_is_allowed(words: tuple[str, ...], said: str, attn: Answer) -> None:
    done = attn(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("attn: ")
    assert said in line or said in line.replace("key_value", "kv")


def test_checking_a_mechanism_reports_every_law(answer: Answer) -> None:
    rows = answer("check", "mqa")
    verdicts = {row["law"]: row["verdict"] for row in rows}
    assert {"decode_equals_forward", "batch_invariance", "state_bytes", "cost", "compiles"} <= verdicts.keys()
    assert set(verdicts.values()) <= {"kept", "not asked"}


def test_every_named_dataset_and_recipe_is_listed_and_recipes_name_listed_data(answer: Answer) -> None:
    from attn_cli.recipe import read_recipe
    from attn_train.data.images import known_images
    from attn_train.data.labels import QUESTIONS
    from attn_train.data.load import known_texts
    from attn_train.data.pairs import known_pair_sets
    from attn_train.data.synthetic import MAKERS, RULES

    datasets = {row["name"] for row in answer("list", "datasets")}
    assert datasets == {*known_images(), *known_texts(), *known_pair_sets(), QUESTIONS} >= {*RULES, *MAKERS}
    rows = answer("list", "recipes")
    assert all(row["summary"] for row in rows)
    assert {read_recipe(row["name"]).data.name for row in rows} <= datasets | {"", None}


def test_a_quantized_model_is_said_to_be_of_its_types(answer: Answer, tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc \n")
    config = DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=32, hidden_size=32, num_layers=1, num_heads=2,
                           mechanism="mha", norm="rms", feed_forward="swiglu", positions="rotary")  # fmt: skip
    save_model(tmp_path / "own", Decoder(config), tokenizer)
    (tmp_path / "text").write_text("abc cab\n" * 30)
    target = str(tmp_path / "x.gguf")
    said = answer("models", "quantize", str(tmp_path / "own"), target, "--text", str(tmp_path / "text"))
    assert (said["path"], said["layout"], said["types"]["attn_q"]) == (target, "llama", "q8_0")
    assert said["perplexity_after"] == pytest.approx(said["perplexity_before"], rel=0.01)
