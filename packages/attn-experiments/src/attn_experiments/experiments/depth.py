"""Claims 29, 30 and 50: residual connections, pre- and post-norm and RMSNorm in deep stacks; loss landscapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_experiments.experiments.lookups import repeats
from attn_experiments.report import Curves, Result, Settings, judged, spread, write
from attn_experiments.small_models import build, layer, learn, next_token_loss

WIDTH, DEPTH, SYMBOLS, TOKENS = 32, 10, 8, 18


class Stack(nn.Module):
    """Blocks of causal attention and a feed-forward layer, each after a norm; `residual` adds residual connections."""

    def __init__(self, *, residual: bool, depth: int = DEPTH) -> None:
        super().__init__()
        self.residual = residual
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.attention = nn.ModuleList(layer("mha", hidden_size=WIDTH, num_heads=4) for _ in range(depth))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * depth + 1))
        self.unembedding = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, symbols]."""
        hidden = self.embedding(tokens) + self.places[: tokens.shape[1]]
        parts = [part for pair in zip(self.attention, self.feed_forward, strict=True) for part in pair]
        for norm, part in zip(self.norms, parts, strict=False):
            out = part(norm(hidden))
            hidden = hidden + out if self.residual else out
        logits: Tensor = self.unembedding(self.norms[-1](hidden))
        return logits


def stack(seed: int, *, residual: bool) -> Stack:
    """A stack whose weights are initialised from the seed."""
    torch.manual_seed(seed)
    return Stack(residual=residual)


def losses_of(model: nn.Module, steps: int, seed: int, *, warmup: int = 20, rate: float = 2e-3) -> list[float]:
    """Train a model to predict the next token of repeating texts (see `repeats`), and return its losses."""
    data = repeats(32 * steps, seed).view(steps, 32, -1)
    return learn(
        model,
        lambda step: next_token_loss(model(data[step])[:, :-1], data[step][:, 1:]),
        steps,
        rate=rate,
        warmup=warmup,
    )


Plane = list[list[float]]


def directions(model: nn.Module, seed: int) -> list[list[Tensor]]:
    """Two random directions, with filter-wise normalisation (Li et al. 2018, arXiv 1712.09913, section 4)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        direction = []
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim < 2:
                direction.append(
                    torch.zeros_like(weight)
                )  # biases and gains are not perturbed, as in the paper's figures
                continue
            own, other = (rows.detach().flatten(1).norm(dim=1) for rows in (weight, drawn))
            direction.append(drawn * (own / other).view(-1, *[1] * (weight.ndim - 1)))
        found.append(direction)
    return found


@torch.no_grad()
def landscape(model: nn.Module, loss: Callable[[], Tensor], *, points: int = 13, reach: float = 1.0) -> Plane:
    """The loss [points, points] on a plane through the weights, along two random directions; restores the weights."""
    before = [weight.clone() for weight in model.parameters()]
    one, other = directions(model, seed=0)
    steps = torch.linspace(-reach, reach, points).tolist()
    plane = []
    for a in steps:
        row = []
        for b in steps:
            for weight, own, first, second in zip(model.parameters(), before, one, other, strict=True):
                weight.copy_(own + a * first + b * second)
            row.append(loss().item())
        plane.append(row)
    for weight, own in zip(model.parameters(), before, strict=True):
        weight.copy_(own)
    return plane


def roughness(plane: Sequence[Sequence[float]]) -> float:
    """The mean absolute second difference along both directions, divided by the range of the losses: 0 for a plane."""
    grid = torch.tensor(plane).clamp(max=50)
    bends = torch.cat([grid.diff(n=2, dim=0).abs().flatten(), grid.diff(n=2, dim=1).abs().flatten()])
    return float(bends.mean() / (grid.max() - grid.min()).clamp(min=1e-9))


def draw_landscapes(planes: dict[str, Plane], path: Path) -> None:
    """Draw filled contours of the logarithm of the loss, one panel for each model, as PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(planes), 4.2), layout="constrained")
    for place, (name, plane) in enumerate(planes.items(), start=1):
        axes = figure.add_subplot(1, len(planes), place)
        places = torch.linspace(-1, 1, len(plane)).tolist()
        shown = axes.contourf(places, places, torch.tensor(plane).clamp(min=1e-3).log10().tolist(), levels=20)
        axes.plot([0], [0], "r+")
        axes.set_title(f"{name}: log10 of the loss", fontsize="small")
        figure.colorbar(shown, ax=axes, shrink=0.8)
    write(figure, path)


def residuals(settings: Settings) -> Result:
    """CL-50: a deep stack with and without residual connections: final loss, initial gradients and loss landscape."""
    steps, rows, finals = settings.steps(250), [], {}
    lines, planes = {}, {}
    for name, residual in (("with residuals", True), ("without", False)):
        runs, ratios, bends = [], [], []
        course: list[float] = []
        for seed in settings.runs:
            model = stack(seed, residual=residual)
            ratios.append(gradient_ratio(model))
            course = losses_of(model, steps, 1000 + seed)
            tokens = repeats(32, 4321)
            plane = landscape(model, lambda m=model, t=tokens: next_token_loss(m(t)[:, :-1], t[:, 1:]), points=9)  # type: ignore[misc]
            runs.append(sum(course[-10:]) / len(course[-10:]))
            bends.append(roughness(plane))
            planes[name] = plane
            settings.say(f"{name}, seed {seed}: loss {runs[-1]:.3f}, roughness {bends[-1]:.3f}")
        finals[name] = (runs, ratios, bends)
        lines[name] = [(float(step), course[step]) for step in range(0, steps, max(1, steps // 20))]
        rows.append(
            {
                "stack": f"{DEPTH} blocks {name}",
                "loss at the end": spread(runs),
                "gradient of the first block / of the last, at the start": spread(ratios, 3),
                "roughness of the loss around it": spread(bends, 3),
            }
        )
    with_, without = finals["with residuals"], finals["without"]
    verdict, because = judged(
        all_of={
            "with residuals the loss is lower, in every run": max(with_[0]) < min(without[0]),
            "and the surface around it is smoother, relative to the spread of its losses": max(with_[2])
            < min(without[2]),
            "without them it has learned at all, so that the surfaces of two trained stacks are compared": max(
                without[0]
            )
            < math.log(SYMBOLS) - 0.3,
        }
    )
    drawings = {"landscape": partial(draw_landscapes, planes)}
    shown = Curves(title="A deep stack", x="steps", y="loss, nats a token", lines=lines)
    return Result(
        rows=rows, verdict=verdict, because=because, curves=shown, facts={"planes": planes}, drawings=drawings
    )


def gradient_ratio(model: Stack) -> float:
    """The gradient norm of the first block's value weights, divided by that of the last block's."""
    tokens = repeats(32, 5)
    layers: list[Any] = list(model.attention)
    loss = next_token_loss(model(tokens)[:, :-1], tokens[:, 1:])
    first, last = torch.autograd.grad(loss, [layers[0].value.weight, layers[-1].value.weight])
    return float(first.norm() / last.norm())


def decoder(seed: int, **fields: Any) -> Any:
    """A decoder of twelve blocks, with weights initialised from the seed."""
    sizes = {"vocab_size": SYMBOLS, "max_seq_len": TOKENS, "hidden_size": WIDTH, "num_layers": 12, "num_heads": 4}
    return build("decoder", seed, **sizes, **fields)


def pre_norm(settings: Settings) -> Result:
    """CL-29: pre-norm and post-norm decoders of twelve blocks, with and without a warm-up of the learning rate."""
    steps, rows, finals = settings.steps(150), [], {}
    for place in ("pre", "post"):
        for warmup in (0, 50):
            ends = []
            for seed in settings.runs:
                course = losses_of(decoder(seed, norm_place=place), steps, 1000 + seed, warmup=warmup, rate=5e-3)
                ends.append(sum(course[-10:]) / len(course[-10:]))
            finals[place, warmup] = ends
            rows.append({"norm": place, "warm-up, steps": warmup, "loss at the end": spread(ends)})
            settings.say(str(rows[-1]))
    learned = math.log(SYMBOLS) - 0.3
    verdict, because = judged(
        all_of={
            "pre-norm learns without a warm-up, in every run": max(finals["pre", 0]) < learned,
            "post-norm does not, in any": min(finals["post", 0]) > learned,
            "post-norm does with one": min(finals["post", 50]) < learned,
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)


def rms_norm(settings: Settings) -> Result:
    """CL-30: RMSNorm in place of LayerNorm, in decoders of twelve blocks."""
    ends: dict[str, list[float]] = {"layer": [], "rms": []}
    for seed in settings.runs:
        for norm, found in ends.items():
            course = losses_of(decoder(seed, norm=norm), settings.steps(150), 1000 + seed)
            found.append(sum(course[-10:]) / len(course[-10:]))
        settings.say(f"seed {seed}: { ({norm: round(found[-1], 3) for norm, found in ends.items()}) }")
    norms = decoder(0, norm="rms").norm(5 * torch.randn(100, WIDTH)).norm(dim=-1)
    rows = [{"norm": norm, "loss at the end": spread(found, 3)} for norm, found in ends.items()]
    verdict, because = judged(
        all_of={
            f"all tokens have the norm √{WIDTH} after it": bool(((norms - WIDTH**0.5).abs() < 0.01).all()),
            "every run with RMSNorm ends lower than every one with LayerNorm": max(ends["rms"]) < min(ends["layer"]),
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)
