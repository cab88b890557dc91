"""Draws the figures of docs/course, each for light and for dark pages, into docs/course/pictures.

    python tools/course_figures.py            draw all
    python tools/course_figures.py heads      draw some

The diagrams here are boxes and arrows; curves and heat maps are computed in course_curves.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import course_curves as curves
import matplotlib as mpl
import workspace
from course_board import THEMES, WARM, Board
from matplotlib.patches import FancyArrowPatch, Rectangle

OUT = workspace.ROOT / "docs" / "course" / "pictures"


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


def search(theme: str) -> Board:
    """A query, keys and values as those of a search engine."""
    board = Board(theme, 6.6, 2.2)
    board.plain(9.4, 3.2)
    board.box(1.2, 1.6, "dogs bark", width=1.8, color=board.accent)
    board.text(1.2, 2.6, "query")
    for y, key, value, weight in (
        (2.5, "cats and dogs", "pets", 0.24),
        (1.6, "dogs bark", "noise", 0.67),
        (0.7, "stock markets", "money", 0.09),
    ):
        board.box(4.5, y, key, width=2.2)
        board.arrow((2.15, 1.6), (3.35, y))
        board.axes.add_patch(FancyArrowPatch((5.65, y), (7.2, y), arrowstyle="-", color=WARM, lw=14 * weight))
        board.text(6.4, y + 0.3, f"{weight:.2f}", fontsize=8)
        board.box(8.2, y, value, width=1.8)
    board.text(4.5, 3.05, "keys")
    board.text(8.2, 3.05, "values")
    return board


def mixing(theme: str) -> Board:
    """What the last of six tokens reads, and through how many steps, by three kinds of layer."""
    board = Board(theme, 8.2, 2.2)
    board.plain(21.5, 3.4)
    for left, name in ((0.0, "recurrent: n steps"), (7.5, "convolution: log n layers"), (15.0, "attention: 1 step")):
        board.text(left + 3.0, 3.2, name)
        for place in range(6):
            board.axes.plot([left + place + 0.5] * 2, [0.4, 2.4], "o", color=board.ink, ms=4)
            for near in range(6):
                linked = near in (place - 1, place, place + 1) if left == 7.5 else place == 5 and left == 15.0
                if linked or (left == 0.0 and near == place):
                    board.axes.plot([left + near + 0.5, left + place + 0.5], [0.4, 2.4], color=board.accent, lw=0.8)
            if left == 0.0 and place < 5:
                board.arrow((place + 0.6, 2.4), (place + 1.4, 2.4), color=WARM)
    return board


def experts(theme: str) -> Board:
    """A mixture of experts: a router sends each token to two of four feed-forwards."""
    board = Board(theme, 6.2, 2.6)
    board.plain(9.0, 4.0)
    board.box(4.5, 0.4, "token $x$", width=1.6)
    board.box(1.2, 1.1, "router: softmax, top 2", width=2.3, color=WARM)
    board.arrow((3.7, 0.5), (2.3, 0.85))
    for place, weight in enumerate((None, 0.7, None, 0.3)):
        x = 1.5 + 2 * place
        board.box(x, 2.2, f"expert {place + 1}", width=1.6, color=board.accent if weight else None)
        if weight:
            board.arrow((4.5, 0.7), (x, 1.9), color=board.accent)
            board.arrow((x, 2.5), (4.5, 3.3), color=board.accent)
            board.text(x + 0.55 * (1 if place > 2 else -1), 2.85, f"× {weight}", fontsize=8)
    board.box(4.5, 3.6, "sum", width=1.2)
    return board


def patches(theme: str) -> Board:
    """An image of 28 x 28 pixels, cut into patches, which become tokens."""
    board = Board(theme, 6.6, 1.9)
    board.plain(9.4, 2.8)
    for row in range(4):
        for column in range(4):
            corner = (0.3 + 0.5 * column, 2.2 - 0.5 * row - 0.1)
            color = board.accent if (row, column) in {(0, 1), (0, 2), (1, 2), (2, 1), (3, 1)} else board.fill
            board.axes.add_patch(Rectangle(corner, 0.5, 0.5, fc=color, ec=board.line))
    board.arrow((2.5, 1.6), (3.2, 1.6))
    board.box(4.2, 1.6, "times $W$,\n+ position", width=1.7)
    board.arrow((5.2, 1.6), (5.8, 1.6))
    for place, name in enumerate(("class", "1", "2", "...", "16")):
        board.box(6.3 + 0.68 * place, 1.6, name, width=0.6, color=WARM if name == "class" else None)
    board.text(7.7, 0.8, "17 tokens of an encoder")
    return board


def tokens(theme: str) -> Board:
    """From a text to the next word."""
    board = Board(theme, 8.2, 1.5)
    board.plain(12.0, 2.2)
    steps = ("text", "pieces", "numbers", "embeddings", "blocks", "logits", "choice")
    for place, name in enumerate(steps):
        x = 0.9 + 1.7 * place
        board.box(x, 1.3, name, width=1.3, color=board.accent if name == "blocks" else None)
        if place:
            board.arrow((x - 1.0, 1.3), (x - 0.7, 1.3))
    board.arrow((11.1, 0.95), (2.6, 0.95), color=WARM, bend=-0.12)
    board.text(6.9, 0.2, "appended, and again", color=WARM, fontsize=8)
    return board


FIGURES: dict[str, Callable[[str], Board]] = {
    "encoder-decoder": encoder_decoder,
    "tiles": kernels,
    "softmax": curves.softmax_curve,
    "random-features": curves.random_features,
    "singular-values": curves.singular_values,
    **{f.__name__: f for f in (timeline, lstm, heads, transformer, search, mixing, experts, patches, tokens)},
    **{f.__name__: f for f in (curves.scores, curves.sinusoids, curves.patterns, curves.memory, curves.shares)},
    **{f.__name__: f for f in (curves.bits, curves.decoding, curves.graph)},
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
