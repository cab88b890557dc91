"""Draws the figures of docs/course, each for light and for dark pages, into docs/course/pictures.

    python tools/course_figures.py            draw all
    python tools/course_figures.py heads      draw some

Diagrams are boxes and arrows; curves and heat maps are computed by the packages themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attn_variants
import matplotlib as mpl
import torch
import workspace
from attn_core import Causal, Window
from attn_core.masks import BigBird
from attn_core.rotary import sinusoidal
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

OUT = workspace.ROOT / "docs" / "course" / "pictures"
THEMES = {"light": ("#1f2328", "#d0d7de", "#f6f8fa", "#0969da"), "dark": ("#e6edf3", "#484f58", "#161b22", "#58a6ff")}
"""Ink, lines, fill and accent of each theme; pages are seen through the background."""
WARM = "#d4791f"


class Board:
    """Axes without frame in units of text, for boxes and arrows, or for curves."""

    def __init__(self, theme: str, width: float, height: float) -> None:
        self.ink, self.line, self.fill, self.accent = THEMES[theme]
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.figure.patch.set_alpha(0.0)
        self.axes: Any = self.figure.add_subplot()
        self.axes.patch.set_alpha(0.0)

    def plain(self, right: float, top: float) -> None:
        """No axes; x from 0 to `right` and y from 0 to `top`."""
        self.axes.set(xlim=(0, right), ylim=(0, top))
        self.axes.axis("off")

    def box(
        self, x: float, y: float, text: str, *, width: float = 1.6, color: str | None = None
    ) -> tuple[float, float]:
        """A box around (x, y) with a text."""
        edge = color or self.line
        shape = FancyBboxPatch(
            (x - width / 2, y - 0.28), width, 0.56, boxstyle="round,pad=0.02,rounding_size=0.1", fc=self.fill, ec=edge
        )
        self.axes.add_patch(shape)
        self.text(x, y, text)
        return x, y

    def text(self, x: float, y: float, text: str, **kwargs: Any) -> None:
        """Text around (x, y)."""
        self.axes.text(x, y, text, **{"ha": "center", "va": "center", "color": self.ink, "fontsize": 9} | kwargs)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str | None = None, bend: float = 0.0
    ) -> None:
        """An arrow between two points."""
        style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "color": color or self.ink, "lw": 1.0}
        self.axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))

    def labelled(self, x: str, y: str) -> None:
        """Axes with these labels, in ink."""
        self.axes.set(xlabel=x, ylabel=y)
        self.axes.tick_params(colors=self.ink)
        for part in (self.axes.xaxis.label, self.axes.yaxis.label, self.axes.title):
            part.set_color(self.ink)
        for spine in self.axes.spines.values():
            spine.set_color(self.line)
        if self.axes.get_legend_handles_labels()[0]:
            legend = self.axes.legend(frameon=False, fontsize="small")
            for text in legend.get_texts():
                text.set_color(self.ink)

    def map(self, values: torch.Tensor, x: str, y: str) -> None:
        """A heat map, from the page's background to the accent."""
        colors = LinearSegmentedColormap.from_list("page", [self.fill, self.accent])
        self.axes.imshow(values.numpy(), cmap=colors, aspect="auto", interpolation="nearest")
        self.labelled(x, y)


def timeline(theme: str) -> Board:
    """Attention from 2014 to 2017."""
    board = Board(theme, 8.2, 2.4)
    board.plain(10.4, 3.2)
    board.arrow((0.2, 1.6), (10.3, 1.6))
    events = [
        (0.9, "Sep 2014", "encoder-decoder\nSutskever; Cho", 1),
        (2.2, "Sep 2014", "soft search\nBahdanau", -1),
        (3.5, "Oct 2014", "Neural Turing\nMachine\nGraves", 1),
        (4.8, "Feb 2015", "soft and hard\nimages\nXu", -1),
        (6.1, "Aug 2015", "global, local\nLuong", 1),
        (7.4, "Jan 2016", "LSTMN: within\na sentence\nCheng", -1),
        (8.7, "Feb 2017", "keys and values\nDaniluk", 1),
        (9.7, "Jun 2017", "Transformer\nVaswani", -1),
    ]
    for x, date, text, side in events:
        board.axes.plot([x], [1.6], "o", color=board.accent, ms=5)
        board.text(x, 1.6 + 0.85 * side, text, fontsize=8)
        board.text(x, 1.6 - 0.28 * side, date, fontsize=7, color=board.accent)
    return board


def lstm(theme: str) -> Board:
    """One step of an LSTM cell."""
    board = Board(theme, 6.4, 3.2)
    board.plain(9.4, 4.6)
    board.arrow((0.2, 4.0), (9.2, 4.0), color=board.accent)
    board.text(0.5, 4.3, "$c_{t-1}$")
    board.text(9.0, 4.3, "$c_t$")
    for x, gate, at in (
        (1.8, "forget $f$\nσ", "×"),
        (3.6, "input $i$\nσ", "+"),
        (5.2, "new $g$\ntanh", ""),
        (7.4, "output $o$\nσ", "×"),
    ):
        board.box(x, 1.7, gate, width=1.4)
        board.arrow((x, 0.75), (x, 1.38))
        if gate[0] in "fi":
            board.text(
                x, 4.0, at, fontsize=14, bbox={"boxstyle": "circle,pad=0.1", "fc": board.fill, "ec": board.accent}
            )
            board.arrow((x, 2.0), (x, 3.72))
    board.arrow((5.2, 2.0), (3.75, 3.0), bend=0.1)
    board.text(3.3, 2.9, "×", fontsize=12)
    board.box(7.4, 3.1, "× tanh $c_t$", width=1.5)
    board.arrow((7.4, 2.0), (7.4, 2.8))
    board.arrow((7.4, 4.0), (7.4, 3.4), color=board.accent)
    board.arrow((8.15, 3.1), (9.2, 3.1))
    board.text(9.0, 2.8, "$h_t$")
    board.axes.plot([0.4, 7.4], [0.75, 0.75], color=board.ink, lw=1)
    board.text(1.0, 0.4, "$[h_{t-1}; x_t]$")
    return board


def encoder_decoder(theme: str) -> Board:
    """A translation through one vector, and with attention."""
    board = Board(theme, 7.6, 3.0)
    board.plain(10.6, 4.2)
    source, target = ("the", "cat", "sleeps"), ("die", "Katze", "schläft")
    for place, word in enumerate(source):
        board.box(1.0 + 1.5 * place, 1.3, f"$h_{place + 1}$", width=0.9)
        board.text(1.0 + 1.5 * place, 0.5, word)
        board.arrow((1.0 + 1.5 * place, 0.7), (1.0 + 1.5 * place, 1.0))
        board.arrow((1.45 + 1.5 * place, 1.3), (2.05 + 1.5 * place if place < 2 else 5.35, 1.3))
    board.box(5.8, 1.3, "$v$", width=0.8, color=WARM)
    board.text(5.8, 0.55, "one vector", color=WARM, fontsize=8)
    for place, word in enumerate(target):
        x = 7.3 + 1.3 * place
        board.box(x, 1.3, f"$s_{place + 1}$", width=0.8)
        board.text(x, 2.1, word)
        board.arrow((x, 1.6), (x, 1.9))
        board.arrow((6.2 + 1.3 * place, 1.3), (6.9 + 1.3 * place, 1.3))
    for place, strength in enumerate((0.1, 0.8, 0.1)):
        style: dict[str, Any] = {
            "arrowstyle": "-",
            "lw": 0.6 + 4 * strength,
            "color": board.accent,
            "alpha": 0.35 + 0.6 * strength,
        }
        board.axes.add_patch(
            FancyArrowPatch((1.0 + 1.5 * place, 1.62), (8.6, 3.5), connectionstyle="arc3,rad=-0.12", **style)
        )
    board.text(8.9, 3.7, "$c_2$: with attention, a mean of all $h_j$", color=board.accent, fontsize=8)
    board.arrow((8.6, 3.4), (8.6, 2.3), color=board.accent)
    return board


def softmax_curve(theme: str) -> Board:
    """The weight of one of two scores by their difference, at three temperatures."""
    board = Board(theme, 5.2, 3.0)
    x = torch.linspace(-6, 6, 241)
    for temperature, color in ((0.3, WARM), (1.0, board.accent), (3.0, board.ink)):
        pair = torch.stack([x, torch.zeros_like(x)], -1) / temperature
        board.axes.plot(x.numpy(), pair.softmax(-1)[:, 0].numpy(), color=color, label=f"temperature {temperature:g}")
    board.labelled("difference of two scores", "weight of the first")
    return board


def heads(theme: str) -> Board:
    """Multi-head attention."""
    board = Board(theme, 6.4, 3.4)
    board.plain(9.0, 5.2)
    board.text(4.5, 0.3, "$x$  [tokens, D]")
    for head, x in enumerate((1.6, 4.5, 7.4)):
        for part, shift in (("q", -0.9), ("k", 0.0), ("v", 0.9)):
            board.box(x + shift, 1.4, f"$W^{part}_{head + 1}$", width=0.75)
            board.arrow((4.5, 0.55), (x + shift, 1.08))
            board.arrow((x + shift, 1.72), (x, 2.35))
        board.box(x, 2.65, "softmax$(q k^T / \\sqrt{d})\\, v$", width=2.3, color=board.accent)
        board.arrow((x, 2.97), (4.5, 3.55))
    board.box(4.5, 3.85, "side by side  [tokens, H · d]", width=3.4)
    board.arrow((4.5, 4.15), (4.5, 4.5))
    board.box(4.5, 4.8, "$W^O$", width=1.0)
    return board


def transformer(theme: str) -> Board:
    """Encoder and decoder of the Transformer."""
    board = Board(theme, 6.2, 4.8)
    board.plain(9.0, 8.0)
    blocks = {
        2.4: ["self-attention", "add, norm", "feed-forward", "add, norm"],
        6.4: [
            "masked self-attention",
            "add, norm",
            "attention to the source",
            "add, norm",
            "feed-forward",
            "add, norm",
        ],
    }
    for x, names in blocks.items():
        board.text(x, 0.3, "source words" if x < 4 else "target words, shifted")
        board.arrow((x, 0.5), (x, 0.82))
        board.box(x, 1.1, "embedding + positions", width=2.8)
        for place, name in enumerate(names):
            y = 2.1 + 0.78 * place
            board.box(x, y, name, width=2.8, color=board.accent if "attention" in name else None)
            board.arrow((x, y - 0.5), (x, y - 0.28))
        board.text(x - 1.75 if x < 4 else x + 1.75, 3.3 if x < 4 else 4.1, "× 6", fontsize=11)
    board.arrow((3.8, 4.45), (5.0, 3.68), color=board.accent, bend=-0.2)
    board.text(4.3, 4.75, "k, v", color=board.accent)
    board.arrow((6.4, 6.3), (6.4, 6.62))
    board.box(6.4, 6.9, "linear, softmax", width=2.8)
    board.arrow((6.4, 7.2), (6.4, 7.5))
    board.text(6.4, 7.75, "the next word")
    return board


def sinusoids(theme: str) -> Board:
    """Sinusoidal positions as a heat map."""
    board = Board(theme, 5.6, 3.2)
    board.map(sinusoidal(torch.arange(64), 64), "element of the encoding", "position")
    return board


def patterns(theme: str) -> Board:
    """Full, window, dilated, strided, fixed and BigBird masks over 24 tokens, side by side."""
    board = Board(theme, 8.2, 1.9)
    at = torch.arange(24)
    from attn_core.masks import Fixed, Strided

    masks = {
        "causal": Causal(),
        "window": Window(left=2, right=2),
        "dilated": Window(left=2, right=2, dilation=3),
        "strided": Strided(5),
        "fixed": Fixed(block=6, summaries=1),
        "BigBird": BigBird(block=2, random=1).over(24).of_head(0),
    }
    gap = torch.full((24, 4), torch.nan)
    grids = [mask.allows(at[:, None], at).float() for mask in masks.values()]
    board.map(torch.cat([part for grid in grids for part in (grid, gap)], 1)[:, :-4], "", "")
    for place, name in enumerate(masks):
        board.text(28 * place + 11.5, -2.5, name)
    board.axes.axis("off")
    return board


def memory(theme: str) -> Board:
    """The addressing of a Neural Turing Machine, in its steps."""
    board = Board(theme, 6.8, 2.2)
    names = ("before", "content", "gate", "shift", "sharpen")
    given = torch.tensor([0.1, 0.7, 0.2, 0.0, 0.0])
    content = torch.tensor([2.0, 0.5, 0.2, 0.4, 0.1]).softmax(-1)
    gated = 0.6 * content + 0.4 * given
    moved = torch.roll(gated, 1) * 0.9 + gated * 0.1
    sharp = moved**3 / (moved**3).sum()
    for place, (name, values) in enumerate(zip(names, (given, content, gated, moved, sharp), strict=True)):
        x = torch.arange(5) + 6.5 * place
        board.axes.bar(x.tolist(), values.tolist(), color=board.accent, width=0.8)
        board.text(float(x.mean()), -0.12, name)
    board.axes.set(ylim=(-0.2, 1.0))
    board.axes.axis("off")
    return board


def random_features(theme: str) -> Board:
    """The error of Performer by the number of random features."""
    from attn_experiments.experiments.numbers import performer_errors

    board = Board(theme, 5.2, 3.0)
    counts = (16, 64, 256, 1024)
    found = [performer_errors(0, count, 15) for count in counts]
    for place, (label, color) in enumerate((("one draw", board.accent), ("mean of 15 draws", WARM))):
        board.axes.plot(counts, [row[place] for row in found], "o-", color=color, label=label)
    board.axes.set(xscale="log", yscale="log")
    board.labelled("random features", "error against softmax attention")
    return board


def singular_values(theme: str) -> Board:
    """The energy of matrices of attention weights in their largest singular values."""
    board = Board(theme, 5.2, 3.0)
    torch.manual_seed(0)
    layer: Any = attn_variants.layer("mha", hidden_size=64, num_heads=1, causal=False)
    for scale, color in ((1.0, board.accent), (4.0, WARM)):
        with torch.no_grad():
            weights = layer.weights(scale * torch.randn(1, 256, 64))[0, 0]
        energy = torch.linalg.svdvals(weights).square()
        board.axes.plot((energy.cumsum(0) / energy.sum()).numpy(), color=color, label=f"inputs of size {scale:g}")
    board.labelled("number of singular values of 256", "part of the energy")
    return board


def kernels(theme: str) -> Board:
    """The tiles of FlashAttention."""
    board = Board(theme, 6.6, 2.9)
    board.plain(9.4, 4.2)
    board.box(1.5, 3.4, "HBM: 40 GB, 1.6 TB/s", width=2.7)
    board.box(5.0, 3.4, "SRAM: 20 MB, 19 TB/s", width=2.8, color=WARM)
    for place in range(4):
        board.box(
            1.5,
            2.5 - 0.62 * place,
            f"$K_{place + 1}, V_{place + 1}$",
            width=1.6,
            color=board.accent if place == 1 else None,
        )
    board.arrow((2.35, 1.9), (3.9, 1.9), color=board.accent)
    board.text(3.1, 2.15, "a tile", color=board.accent, fontsize=8)
    board.box(5.0, 1.9, "$S = Q K_2^T / \\sqrt{d}$", width=2.1)
    board.arrow((5.0, 1.58), (5.0, 1.28))
    board.box(5.0, 1.0, "$m, \\ell, O$ rescaled", width=2.1)
    board.arrow((6.1, 1.0), (7.3, 1.0))
    board.box(8.2, 1.0, "$O$ once", width=1.6)
    board.text(8.2, 1.9, "no n × n matrix\nis ever written", fontsize=8)
    return board


def shares(theme: str) -> Board:
    """The parts of a forward pass of Llama 3 70B by length."""
    board = Board(theme, 5.8, 3.0)
    lengths = (1000, 4000, 16_000, 64_000, 128_000)
    bottom = [0.0] * len(lengths)
    width, inner, words = 8192, 28_672, 128_256
    parts: dict[str, list[int]] = {
        "feed-forward": [6 * width * inner] * 5,
        "projections": [2 * width * (2 * width + 2048)] * 5,
        "pairs": [4 * tokens * width for tokens in lengths],
        "unembedding": [2 * width * words // 80] * 5,
    }
    totals = [sum(part) for part in zip(*parts.values(), strict=True)]
    for (name, costs), color in zip(parts.items(), (board.line, board.accent, WARM, board.ink), strict=True):
        part = [100 * cost / total for cost, total in zip(costs, totals, strict=True)]
        board.axes.bar([f"{n // 1000}k" for n in lengths], part, bottom=bottom, color=color, label=name)
        bottom = [a + b for a, b in zip(bottom, part, strict=True)]
    board.labelled("tokens", "part of the FLOPs, %")
    board.axes.get_legend().set(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return board


FIGURES: dict[str, Callable[[str], Board]] = {
    "timeline": timeline,
    "lstm": lstm,
    "encoder-decoder": encoder_decoder,
    "softmax": softmax_curve,
    "heads": heads,
    "transformer": transformer,
    "sinusoids": sinusoids,
    "patterns": patterns,
    "memory": memory,
    "random-features": random_features,
    "singular-values": singular_values,
    "tiles": kernels,
    "shares": shares,
}


def main() -> None:
    """Draw the figures that are named, or all."""
    mpl.rcParams["svg.hashsalt"] = "attn"
    mpl.rcParams["svg.fonttype"] = "none"
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        for theme in THEMES:
            board = FIGURES[name](theme)
            board.figure.savefig(OUT / f"{name}-{theme}.svg", metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    main()
