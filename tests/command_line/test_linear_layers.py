"""Which kernel multiplies a linear layer, of all that are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Answer = Callable[..., Any]


def test_explain_says_who_multiplies_weights_of_a_format_and_what_becomes_of_them_otherwise(answer: Answer) -> None:
    rows = answer("explain", "linear", "--form", "q8_0", "--hidden-size", "64")
    assert {row["part"] for row in rows} == {"linear, auto", "linear, int8"}
    for part in ("linear, auto", "linear, int8"):
        assert [row["verdict"] for row in rows if row["part"] == part].count("runs") == 1
    # Blocks hold 32 inputs: nobody multiplies half of one.
    rows = answer("explain", "linear", "--form", "q8_0", "--hidden-size", "48")
    assert {row["name"] for row in rows if row["verdict"] == "runs"} == {"torch", "those of int8"}
    assert all(row["reasons"] for row in rows)


def test_explain_says_what_of_fp8_a_cpu_does_not_compute(answer: Answer) -> None:
    rows = answer("explain", "linear", "--form", "fp8")
    assert {row["verdict"] for row in rows} == {"refuses"}
    assert {row["name"] for row in rows} >= {"triton_fp8_w8a8", "triton_fp8_w8a16", "none"}
    rows = answer("explain", "linear", "--form", "fp8_block")
    assert {row["part"] for row in rows} == {"linear, auto", "linear, int8"}
    assert [row["name"] for row in rows if row["verdict"] == "runs"] == ["torch", "those of int8"]
