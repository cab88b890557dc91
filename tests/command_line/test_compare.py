"""Mechanisms side by side, and their pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_cli.commands.costs import with_powers_of_two
from attn_cli.comparison import compare
from attn_cli.pictures import View, as_text, grid_figure, influence_grid, sample_grid, view_of
from attn_core import Capability, Mechanism, MechanismConfig, configure, installed
from attn_core.errors import Incompatible
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Run = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"


def prices(answer: Run, *words: str) -> dict[tuple[str, int], dict[str, int]]:
    return {(row["name"], row["tokens"]): row for row in answer("compare", *words)}


def test_what_is_remembered_grows_with_the_sequence_only_where_the_mechanism_says_so(answer: Run) -> None:
    found = prices(answer, "mha", "gqa", "mqa", "linear", "--num-kv-heads", "2", "--seq", "1000,8000")
    assert found["mqa", 1000]["state_bytes"] * 8 == found["mha", 1000]["state_bytes"]
    assert found["mha", 8000]["state_bytes"] == 8 * found["mha", 1000]["state_bytes"]
    assert found["gqa", 1000]["state_bytes"] * 4 == found["mha", 1000]["state_bytes"]
    assert found["linear", 8000]["state_bytes"] == found["linear", 1000]["state_bytes"]


def test_python_compares_as_the_command_does_and_shows_a_row_for_each_length(answer: Run) -> None:
    found = compare("mha", "gqa", num_kv_heads=2, tokens=[1000, 8000])
    assert list(found) == answer("compare", "mha", "gqa", "--num-kv-heads", "2", "--seq", "1000,8000")
    assert found._repr_html_().count("<tr>") == len(str(found).splitlines()) == 1 + 4


def test_the_list_begins_with_the_mechanisms_of_known_models(answer: Run) -> None:
    used = [bool(installed().mechanisms.get(row["name"]).used_by) for row in answer("list", "mechanisms")]
    assert True in used
    assert used == sorted(used, reverse=True)


def test_linear_attention_costs_in_proportion_and_full_attention_in_the_square(answer: Run) -> None:
    found = prices(answer, "mha", "linear", "--seq", "65536,131072")
    growth = {name: found[name, 131072]["flops"] / found[name, 65536]["flops"] for name in ("mha", "linear")}
    assert growth["linear"] == pytest.approx(2.0, rel=1e-3)
    assert growth["mha"] > 3.8


def test_layers_without_attention_cost_what_torch_counts_and_wait_for_each_token_or_for_none(answer: Run) -> None:
    found = prices(answer, "lstm", "convolution", "mha", "lsh", "lstmn", "--seq", "32,64", "--hidden-size", "16")
    cell, kernel = nn.LSTM(16, 16), nn.Conv1d(16, 16, 3, padding=1)
    for name, layer in (("lstm", cell), ("convolution", kernel)):
        assert found[name, 64]["parameters"] == sum(weight.numel() for weight in layer.parameters())
    with FlopCounterMode(display=False) as counted:
        kernel(torch.randn(1, 16, 64))
    assert found["convolution", 64]["flops"] == counted.get_total_flops()
    products = sum(weight.numel() for name, weight in cell.named_parameters() if "weight" in name)
    assert found["lstm", 64]["flops"] == 64 * 2 * products
    waiting = {name: [found[name, n]["sequential_operations"] for n in (32, 64)] for name, _ in found}
    assert waiting == {"lstm": [32, 64], "convolution": [1, 1], "mha": [1, 1], "lsh": [5, 6], "lstmn": [32, 64]}


def test_curves_and_masks_are_drawn_as_pictures(attn: Run, tmp_path: Path) -> None:
    for words in (("compare", "mha", "linear"), ("show", "sliding_window"), ("show", "additive")):
        path = tmp_path / f"{words[1]}.png"
        done = attn(*words, "--draw", str(path))
        assert done.returncode == 0, done.stderr
        assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["sliding_window", "additive", "moba", "gla"])
def test_a_picture_names_its_axes_and_its_colours_and_its_title_fits(name: str) -> None:
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, dict(mechanism.sketch), hidden_size=16, num_heads=2)
    view = view_of(mechanism, config, 9, dict(mechanism.sketch))
    figure = grid_figure(view, name)
    figure.canvas.draw()
    axes, bar = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == (f"{view.columns} position", f"{view.rows} position")
    assert bar.get_ylabel() == view.measure
    drawn = axes.get_images()[0]
    assert drawn.get_clim() == (0.0, pytest.approx(max(map(max, view.grid))))
    assert drawn.get_array().tolist() == view.grid
    title = figure._suptitle
    assert " ".join(title.get_text().split()) == " ".join(f"{name}: {view.caption}".split())
    across, whole = title.get_window_extent(), figure.bbox
    assert whole.x0 <= across.x0
    assert across.x1 <= whole.x1
    assert across.y0 >= axes.get_window_extent().y1


def test_a_picture_of_nothing_is_drawn_too() -> None:
    figure = grid_figure(View("nothing", [[0.0, 0.0], [0.0, 0.0]]), "price of $x$ and $y$")
    figure.canvas.draw()
    assert figure.axes[0].get_images()[0].get_clim() == (0.0, 1.0)


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
        (("show", "linformer", "--draw", "x.exotic"), "x.exotic"),
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
    assert as_text([[0.0, 1e-3], [1e-16, 1.0]]) == "  ░░\n  ██"


def test_the_sample_of_a_causal_mechanism_is_a_triangle_whose_rows_sum_to_one() -> None:
    mechanism = installed().mechanisms.get("mha")
    grid = sample_grid(mechanism, configure(mechanism, hidden_size=16, num_heads=2), 6)
    assert all(sum(row) == pytest.approx(1.0, abs=1e-6) for row in grid)
    assert all(grid[i][j] == 0.0 for i in range(6) for j in range(i + 1, 6))


def test_weights_of_a_mechanism_without_any_are_refused_by_name() -> None:
    mechanism: Mechanism = installed().mechanisms.get("linformer")
    with pytest.raises(Incompatible, match="'linformer'"):
        sample_grid(mechanism, configure(mechanism, hidden_size=16, num_heads=2), 6)


def view(name: str, positions: int = 12, **options: int) -> View:
    mechanism = installed().mechanisms.get(name)
    causal = mechanism.can(Capability.CAUSAL)
    return view_of(
        mechanism, configure(mechanism, options, hidden_size=16, num_heads=2, causal=causal), positions, options
    )


def test_a_mechanism_that_chooses_is_drawn_with_what_it_chose() -> None:
    drawn = view("moba", block=3, top=2)
    assert drawn.caption.startswith("example: the keys")
    assert drawn.caption.endswith("(block=3, top=2)")
    for query, row in enumerate(drawn.grid):
        blocks = [row[start : start + 3] for start in range(0, 12, 3)]
        own = query // 3
        assert blocks[own] == [float(3 * own + place <= query) for place in range(3)]
        assert [sum(block) for block in blocks[:own]].count(3.0) == min(1, own)
        assert sum(map(sum, blocks)) == query % 3 + 1 + 3 * min(1, own)


def test_a_mechanism_without_a_mask_or_weights_is_drawn_by_what_outputs_depend_on() -> None:
    drawn = view("block_local", block=3)
    layered = influence_grid(installed().mechanisms.get("block_local"), config_of("block_local", block=3), 12)
    assert drawn.caption.startswith("the mask")
    assert [[value > 0 for value in row] for row in layered] == [[value > 0 for value in row] for row in drawn.grid]
    assert view("routing", clusters=2, window=3).caption.startswith("example: how much each output")


@pytest.mark.parametrize("name", installed().mechanisms.names())
def test_every_mechanism_has_a_picture_and_always_the_same(name: str) -> None:
    one, again = (view(name, **installed().mechanisms.get(name).sketch) for _ in range(2))
    assert one == again
    assert {len(row) for row in one.grid} == {12} == {len(one.grid)}
    assert all(0 <= value < math.inf for row in one.grid for value in row)
    assert any(value > 0 for row in one.grid for value in row)


def config_of(name: str, **options: int) -> MechanismConfig:
    mechanism = installed().mechanisms.get(name)
    return configure(mechanism, options, hidden_size=16, num_heads=2, causal=mechanism.can(Capability.CAUSAL))
