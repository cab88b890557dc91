"""The curves and heat maps of docs/course, which the packages themselves compute; see course_figures.py."""

from __future__ import annotations

from typing import Any

import attn_variants
import torch
from attn_core import Causal, Window
from attn_core.masks import BigBird
from attn_core.rotary import sinusoidal
from course_board import WARM, Board


def scores(theme: str) -> Board:
    """The weights of five keys by six scores, for the same query and keys."""
    board = Board(theme, 5.2, 3.0)
    drawn = torch.Generator().manual_seed(0)
    keys, query, matrix, v = (torch.randn(*shape, generator=drawn) for shape in ((5, 4), (4,), (4, 4), (4,)))
    found = {
        "cosine": torch.cosine_similarity(keys, query[None]),
        "additive": torch.tanh(query @ matrix + keys @ matrix.T) @ v,
        "dot": keys @ query,
        "general": keys @ matrix @ query,
        "location": torch.randn(5, 4, generator=drawn) @ query,
        "scaled dot": keys @ query / 2,
    }
    board.map(torch.stack([row.softmax(-1) for row in found.values()]), "key", "")
    board.axes.set_yticks(range(len(found)), list(found))
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


def bits(theme: str) -> Board:
    """The error of cached rows with an outlier by their bits, with a scale for each row or for each 32 elements."""
    board = Board(theme, 5.2, 3.0)
    rows = torch.randn(1000, 128, generator=torch.Generator().manual_seed(0))
    rows[:, 0] *= 20
    for together, color in ((128, board.accent), (32, WARM)):
        errors = []
        for width in range(2, 9):
            top, parts = 2 ** (width - 1) - 1, rows.view(1000, -1, together)
            scale = parts.abs().amax(-1, keepdim=True) / top
            back = ((parts / scale).round() * scale).view_as(rows)
            errors.append(float((back - rows)[:, 1:].norm() / rows[:, 1:].norm()))
        board.axes.plot(range(2, 9), errors, "o-", color=color, label=f"a scale for {together} elements")
    board.labelled("bits of an element", "error of the other elements")
    return board


def decoding(theme: str) -> Board:
    """Tokens a second of a decode step of Llama 3 70B on an H100 by the number of requests: bounds of its memory."""
    from attn_experiments.machine import DecodeStep, gpu

    board = Board(theme, 5.2, 3.0)
    counts = [2**power for power in range(10)]
    for tokens, color in ((1000, board.accent), (8000, WARM)):
        found = []
        for batch in counts:
            step = DecodeStep(batch=batch, tokens=tokens, heads=64, kv_heads=8, size=128, layers=80, parameters=70e9)
            found.append(batch / sum(bound.seconds for bound in step.bounds(gpu("h100")).values()))
        board.axes.plot(counts, found, "o-", color=color, label=f"{tokens} tokens each")
    board.axes.set(xscale="log", yscale="log")
    board.labelled("requests", "tokens a second")
    return board


def graph(theme: str) -> Board:
    """Two rings of eight nodes, joined by an edge; attention is over a node's neighbours."""
    board = Board(theme, 5.6, 2.2)
    board.axes.set_aspect("equal")
    angle = torch.arange(8) * torch.pi / 4
    places = [(float(x + s), float(y)) for s in (0, 3.2) for x, y in zip(angle.cos(), angle.sin(), strict=True)]
    ring = [(i, (i + 1) % 8) for i in range(8)]
    for one, other in [*ring, *((a + 8, b + 8) for a, b in ring), (0, 12)]:
        board.axes.plot(*zip(places[one], places[other], strict=True), color=board.line, zorder=1)
    for place, (x, y) in enumerate(places):
        known = place in {2, 4, 6, 10, 12, 14}
        color = (board.accent if place < 8 else WARM) if known else board.fill
        board.axes.scatter([x], [y], s=90, color=color, edgecolors=board.ink, zorder=2)
    board.axes.axis("off")
    return board
