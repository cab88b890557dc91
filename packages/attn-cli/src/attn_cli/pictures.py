"""Pictures of mechanisms, in characters and in files: masks, attention weights of a random layer, curves of costs."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attn_core import Capability, Mask, Mechanism, MechanismConfig
from attn_core.errors import Incompatible, InvalidValue, MissingPackage
from attn_schema.device import AUTO, require_device

TITLE_WIDTH = 72
"""Most characters in a line of a picture's title."""

Grid = list[list[float]]
"""One row per query and one column per key, both from position 0."""


def sample_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """The absolute attention weights, averaged over heads; raises as `weights_of`."""
    grid: Grid = weights_of(mechanism, config, positions).abs().mean(0).tolist()
    return grid


def seen_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """1 where the first head gives a key a weight above 0, else 0; raises as `weights_of`."""
    grid: Grid = (weights_of(mechanism, config, positions)[0] > 0).double().tolist()
    return grid


def weights_of(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Any:
    """The attention weights [heads, query, key] of a layer with random weights for a random input.

    Raises `Incompatible` for a mechanism that has no attention weights, `MissingPackage` without torch.
    """
    if not mechanism.can(Capability.WEIGHTS):
        message = f"mechanism {mechanism.name!r} has no attention weights to draw"
        raise Incompatible(message, mechanism=mechanism.name)
    torch = tensors()
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        layer, rows, source = sample_layer(torch, mechanism, config, positions)
        return layer.weights(rows, *source)[0]


def influence_grid(mechanism: Mechanism, config: MechanismConfig, positions: int) -> Grid:
    """How much each output of a layer with one head depends on each input, relative to the largest in its row.

    This is measured by the norm of the gradient of a random projection of the output with respect to the input. Raises
    `MissingPackage` without torch.
    """
    torch = tensors()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        one = dataclasses.replace(config, num_heads=1, num_kv_heads=None)
        layer, rows, source = sample_layer(torch, mechanism, one, positions)
        inputs = (source[0] if source else rows).requires_grad_()
        probed = layer(rows, *source)[0] @ torch.randn(config.hidden_size, dtype=torch.float64)
        slopes = [torch.autograd.grad(out, inputs, retain_graph=True)[0][0].norm(dim=-1) for out in probed]
    grid: Grid = [(slope / slope.max().clamp(min=1e-300)).tolist() for slope in slopes]
    return grid


def sample_layer(
    torch: Any, mechanism: Mechanism, config: MechanismConfig, positions: int
) -> tuple[Any, Any, tuple[Any, ...]]:
    """A layer, its input [1, positions, hidden_size], and its source in a tuple, empty if it attends to none."""
    torch.manual_seed(0)
    sized = config if config.max_seq_len else dataclasses.replace(config, max_seq_len=positions)
    layer = mechanism.build(sized).eval().double()
    rows = torch.randn(1, positions, config.hidden_size, dtype=torch.float64)
    return layer, rows, (rows.clone(),) if config.cross else ()


def device_type(device: str) -> str:
    """The type of a device by its name, such as "cuda", on which kernels decide. `auto` is a GPU if there is one.

    Raises `InvalidValue` for an invalid name, `MissingPackage` for `auto` without torch.
    """
    require_device("device", device)
    if device != AUTO:
        return device.partition(":")[0]
    torch = tensors()
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def tensors() -> Any:
    """Import and return torch; raises `MissingPackage`."""
    try:
        import torch
    except ImportError as error:
        raise MissingPackage.of("torch", "drawing an example of a layer") from error
    return torch


class View(NamedTuple):
    """A grid with its caption, the meaning of its values (`measure`), and the names of its rows and columns."""

    caption: str
    grid: Grid
    measure: str = "fraction of heads that see the key"
    rows: str = "query"
    columns: str = "key"


def view_of(
    mechanism: Mechanism, config: MechanismConfig, positions: int, options: Mapping[str, Any] | None = None
) -> View:
    """The mask, if it alone determines what is seen, else an example; `options` are listed in the caption."""
    listed = ", ".join(f"{name}={value}" for name, value in (options or {}).items())
    view = plain_view(mechanism, config, positions)
    return view._replace(caption=f"{view.caption} ({listed})") if listed else view


def plain_view(mechanism: Mechanism, config: MechanismConfig, positions: int) -> View:
    """The view without options in its caption."""
    spec, chooses = mechanism.spec(config), mechanism.can(Capability.CHOOSES)
    if spec is not None and not chooses:
        return View("the mask: which keys (columns) each query (row) sees", mask_grid(spec.mask, positions))
    if mechanism.can(Capability.WEIGHTS, Capability.CHOOSES):
        words = "example: the keys (columns) that each query (row) sees in one head, random layer and input"
        return View(words, seen_grid(mechanism, config, positions), "whether the head sees the key")
    if mechanism.can(Capability.WEIGHTS):
        words = "example: mean weights of keys (columns) for each query (row), random layer and input"
        return View(words, sample_grid(mechanism, config, positions), "mean attention weight")
    words = "example: how much each output (row) depends on each input (column), one head, random layer and input"
    grid = influence_grid(mechanism, config, positions)
    return View(words, grid, "norm of the gradient, relative to the largest in its row", "output", "input")


def mask_grid(mask: Mask, positions: int) -> Grid:
    """The mask over `positions` positions, 1 where a key is seen; if it differs by head, the mean over the heads."""
    bound, heads = mask.over(positions), mask.heads or 1
    masks = [bound.of_head(head) for head in range(heads)]
    places = range(positions)
    return [[sum(bool(one.allows(query, key)) for one in masks) / heads for key in places] for query in places]


SHADES = " ░▒▓█"
LEAST = 1e-12
"""Values below this are rounding errors, and drawn as 0."""


def as_text(grid: Grid) -> str:
    """The grid as text, one line per query; darker characters are larger values, and only zeros stay blank."""
    values = [value for row in grid for value in row]
    if set(values) <= {0.0, 1.0}:
        return "\n".join(" ".join("■" if value else "·" for value in row) for row in grid)
    most = max(*values, LEAST)
    return "\n".join("".join(shade(max(value, 0.0) / most) * 2 for value in row) for row in grid)


def shade(share: float) -> str:
    """The character for a value from 0 to 1."""
    steps = len(SHADES) - 1
    return SHADES[max(round(share * steps), share > LEAST)]


def draw_grid(view: View, name: str, path: Path) -> None:
    """Write the grid as an image file; raises as `save` does."""
    save(grid_figure(view, name), path)


def grid_figure(view: View, name: str) -> Any:
    """The figure of a grid with its caption, axes from position 0 and a colour bar from 0; raises `MissingPackage`."""
    figure = new_figure((5.5, 5.2))
    axes = figure.add_subplot()
    most = max(max(row) for row in view.grid) or 1.0
    image = axes.imshow(view.grid, cmap="Blues", vmin=0.0, vmax=most, interpolation="nearest")
    axes.set_xlabel(f"{view.columns} position")
    axes.set_ylabel(f"{view.rows} position")
    title = textwrap.wrap(f"{name}: {view.caption}".replace("$", r"\$"), TITLE_WIDTH)
    figure.suptitle("\n".join(title), fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(view.measure, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def draw_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], lengths: Sequence[int], path: Path) -> None:
    """Write a figure with one panel per quantity and one line per mechanism over sequence lengths, in log-log axes."""
    figure = new_figure((5.0 * len(curves), 4.2))
    for place, (quantity, lines) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(1, len(curves), place)
        for number, (name, values) in enumerate(lines.items()):
            # Mechanisms often cost the same; dashes of different lengths keep both lines visible.
            axes.plot(lengths, values, marker="o", markersize=3, dashes=(4 + 2 * number, number), label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_title(quantity)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    save(figure, path)


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure of `size` inches; raises `MissingPackage` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("attn-cli[draw]", "drawing") from error
    return Figure(figsize=size, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write the figure; raises `InvalidValue` for a path that cannot be written or an unknown format."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidValue.of("--draw", str(path), f"a file that can be written ({error})") from error
