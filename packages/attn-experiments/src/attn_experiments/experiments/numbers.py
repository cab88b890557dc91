"""Claims 12, 22 and 44, which are numerical and need no training: scaling of scores, and Performer's features."""

from __future__ import annotations

from typing import Any

import torch

from attn_experiments.report import Curves, Result, Settings, judged
from attn_experiments.small_models import layer, mean

SIZES = (4, 16, 64, 256)


def weights_of(mechanism: str, size: int, keys: int, pairs: int, generator: torch.Generator) -> torch.Tensor:
    """Attention weights [pairs, keys] of unit-variance queries and keys, by a layer with identity projections."""
    own = layer(mechanism, hidden_size=size, num_heads=1, causal=False).double()
    with torch.no_grad():
        for part in (own.query, own.key):
            part.weight.copy_(torch.eye(size, dtype=torch.float64))
        rows = torch.randn(pairs, 1 + keys, size, generator=generator, dtype=torch.float64)
        found: torch.Tensor = own.weights(rows)[:, 0, 0, 1:]
    return found / found.sum(-1, keepdim=True)


def variance_with_means(size: int, query_mean: float, key_mean: float, pairs: int, seed: int) -> tuple[float, float]:
    """The measured variance of products of vectors of variance 1 with these means, and d ((1 + μ²)(1 + ν²) - μ²ν²)."""
    query, key = torch.randn(2, pairs, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    products = ((query + query_mean) * (key + key_mean)).sum(-1)
    expected = size * ((1 + query_mean**2) * (1 + key_mean**2) - query_mean**2 * key_mean**2)
    return products.var().item(), expected


def scaling(settings: Settings) -> Result:
    """CL-22 and CL-44: the variance of scores, and the size of the softmax's gradient, by head size."""
    rows: list[dict[str, object]] = []
    lines: dict[str, list[tuple[float, float]]] = {"not scaled": [], "scaled by 1/√d": []}
    for size in SIZES:
        row: dict[str, object] = {"elements of a head": size}
        for name, mechanism in (("not scaled", "dot"), ("scaled by 1/√d", "mha")):
            generator = torch.Generator().manual_seed(1000 * settings.first_seed + size)
            two = weights_of(mechanism, size, 2, settings.steps(4000), generator).clamp(min=1e-300)
            many = weights_of(mechanism, size, 16, settings.steps(500), generator)
            variance = (two[:, 0] / two[:, 1]).log().var().item() / 2
            jacobian = torch.diag_embed(many) - many[:, :, None] * many[:, None, :]
            slope = jacobian.flatten(1).norm(dim=-1).mean().item()
            row |= {f"variance, {name}": f"{variance:.2f}", f"gradient, {name}": f"{slope:.3f}"}
            lines[name].append((float(size), slope))
        rows.append(row)
    moved = [
        variance_with_means(size, 1.0, -2.0, settings.steps(20_000), 1000 * settings.first_seed + size)
        for size in SIZES
    ]
    first, last = (dict(found) for found in lines.values())
    verdict, because = judged(
        all_of={
            "the variance is d, and 1 when scaled (within 15 %)": all(
                abs(float(str(row["variance, not scaled"])) / size - 1) < 0.15
                and abs(float(str(row["variance, scaled by 1/√d"])) - 1) < 0.15
                for row, size in zip(rows, SIZES, strict=True)
            ),
            "with means of 1 and -2 the variance is 6 d, so that √d alone does not make it 1 (within 10 %)": all(
                abs(found / expected - 1) < 0.1 for found, expected in moved
            ),
            "without scaling the gradient falls to less than half from d = 4 to 256": first[256] < first[4] / 2,
            "with it the gradient stays (within a fifth)": abs(last[256] / last[4] - 1) < 0.2,
        }
    )
    shown = Curves(title="Norm of the softmax's Jacobian", x="elements of a head", y="norm", lines=lines)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)


def performer_errors(weights: int, features: int, draws: int) -> tuple[float, float]:
    """The root mean square error of Performer against exact attention whose weights are drawn from the seed `weights`.

    Returns the mean over the draws of random features, and the error of the mean of their outputs.
    """
    sizes: dict[str, Any] = {"hidden_size": 16, "num_heads": 1, "causal": False}
    torch.manual_seed(weights)
    exact = layer("mha", **sizes).double()
    given = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(weights), dtype=torch.float64) / 2
    errors, sums = [], torch.zeros_like(given)
    for seed in range(draws):
        torch.manual_seed(1000 * weights + seed)
        drawn = layer("performer", **sizes, options={"features": features}).double()
        drawn.load_state_dict(exact.state_dict(), strict=False)
        with torch.no_grad():
            out = drawn(given) - exact(given)
        sums += out
        errors.append(out.square().mean().sqrt().item())
    return mean(errors), (sums / draws).square().mean().sqrt().item()


def performer(settings: Settings) -> Result:
    """CL-12: the error of Performer attention relative to exact attention, by the number of random features."""
    rows: list[dict[str, object]] = []
    lines: dict[str, list[tuple[float, float]]] = {"one draw": [], "mean of the draws": []}
    falls: list[float] = []
    before: list[float] = []
    for features in (16, 64, 256, 1024):
        found = [performer_errors(seed, features, settings.steps(30)) for seed in settings.runs]
        error, bias = (mean(parts) for parts in zip(*found, strict=True))
        falls += [old / new for old, (new, _) in zip(before, found, strict=False)]
        before = [new for new, _ in found]
        errors = {"error (root mean square)": f"{error:.4f}", "of the mean of all draws": f"{bias:.4f}"}
        rows.append({"features": features, **errors})
        lines["one draw"].append((float(features), error))
        lines["mean of the draws"].append((float(features), bias))
    verdict, because = judged(
        all_of={
            "with four times as many features the error falls, each time and with all weights, by 1.3 to 2.3 times "
            f"({min(falls):.1f} to {max(falls):.1f}): 1/√m would be 2": min(falls) > 1.3 and max(falls) < 2.3,
            "the mean of the draws is nearer to exact attention than one draw": all(
                bias < error
                for (_, bias), (_, error) in zip(lines["mean of the draws"], lines["one draw"], strict=True)
            ),
        }
    )
    shown = Curves(title="Performer", x="random features", y="error", lines=lines, logarithmic=True)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)
