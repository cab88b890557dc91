"""Mechanisms side by side, and their pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attn_cli.commands.compare import with_powers_of_two
from attn_cli.pictures import as_text
from attn_cli.sample import sample_grid
from attn_core import Mechanism, configure, installed
from attn_core.errors import Incompatible

Run = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"


def prices(answer: Run, *words: str) -> dict[tuple[str, int], dict[str, int]]:
    return {(row["name"], row["tokens"]): row for row in answer("compare", *words)}


def test_what_is_remembered_grows_with_the_sequence_only_where_the_mechanism_says_so(answer: Run) -> None:
    found = prices(answer, "mha", "gqa", "mqa", "linear", "--kv-heads", "2", "--seq", "1000,8000")
    assert found["mqa", 1000]["state bytes"] * 8 == found["mha", 1000]["state bytes"]
    assert found["mha", 8000]["state bytes"] == 8 * found["mha", 1000]["state bytes"]
    assert found["gqa", 1000]["state bytes"] * 4 == found["mha", 1000]["state bytes"]
    assert found["linear", 8000]["state bytes"] == found["linear", 1000]["state bytes"]


def test_linear_attention_costs_in_proportion_and_full_attention_in_the_square(answer: Run) -> None:
    found = prices(answer, "mha", "linear", "--seq", "65536,131072")
    growth = {name: found[name, 131072]["flops"] / found[name, 65536]["flops"] for name in ("mha", "linear")}
    assert growth["linear"] == pytest.approx(2.0, rel=1e-3)
    assert growth["mha"] > 3.8


def test_curves_and_masks_are_drawn_as_pictures(attn: Run, tmp_path: Path) -> None:
    for words in (("compare", "mha", "linear"), ("show", "sliding_window"), ("show", "additive")):
        path = tmp_path / f"{words[1]}.png"
        done = attn(*words, "--draw", str(path))
        assert done.returncode == 0, done.stderr
        assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ([5], [5]),
        ([8, 64], [8, 16, 32, 64]),
        ([7, 9], [7, 8, 9]),
        ([100, 3000], [100, 128, 256, 512, 1024, 2048, 3000]),
    ],
    ids=str,
)
def test_curves_have_a_point_at_each_power_of_two_between_their_ends(given: list[int], drawn: list[int]) -> None:
    assert with_powers_of_two(given) == drawn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "mha", "--seq", "12,many"), "whole numbers"),
        (("compare", "mha", "--seq", "0"), "whole numbers"),
        (("compare", "mha", "no-such-thing"), "no-such-thing"),
        (("compare", "mha", "--draw", "/no/such/folder/x.png"), "/no/such/folder/x.png"),
        (("compare", "mha", "--draw", "x.exotic"), "x.exotic"),
        (("show", "linformer", "--draw", "x.png"), "neither a mask nor attention weights"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(attn: Run, words: tuple[str, ...], said: str) -> None:
    done = attn(*words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("attn: ")
    assert said in line


def test_shades_grow_with_the_weight_and_a_mask_has_two_signs() -> None:
    assert as_text([[0.0, 1.0], [1.0, 0.0]]) == "· ■\n■ ·"
    assert as_text([[0.0, 0.1], [0.2, 0.4]]) == "  ░░\n▒▒██"


def test_the_sample_of_a_causal_mechanism_is_a_triangle_whose_rows_sum_to_one() -> None:
    mechanism = installed().mechanisms.get("mha")
    grid = sample_grid(mechanism, configure(mechanism, width=16, heads=2), 6)
    assert all(sum(row) == pytest.approx(1.0, abs=1e-6) for row in grid)
    assert all(grid[i][j] == 0.0 for i in range(6) for j in range(i + 1, 6))


def test_weights_of_a_mechanism_without_any_are_refused_by_name() -> None:
    mechanism: Mechanism = installed().mechanisms.get("linformer")
    with pytest.raises(Incompatible, match="'linformer'"):
        sample_grid(mechanism, configure(mechanism, width=16, heads=2), 6)
