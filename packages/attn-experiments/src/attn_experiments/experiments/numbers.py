"""Claims 12, 22 and 44, which are numerical and need no training: scaling of scores, and Performer's features."""

from __future__ import annotations

from itertools import pairwise

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


def scaling(settings: Settings) -> Result:
    """CL-22 and CL-44: the variance of scores, and the size of the softmax's gradient, by head size."""
    rows: list[dict[str, object]] = []
    lines: dict[str, list[tuple[float, float]]] = {"not scaled": [], "scaled by 1/√d": []}
    for size in SIZES:
        row: dict[str, object] = {"elements of a head": size}
        for name, mechanism in (("not scaled", "dot"), ("scaled by 1/√d", "mha")):
            generator = torch.Generator().manual_seed(size)
            two = weights_of(mechanism, size, 2, settings.steps(4000), generator).clamp(min=1e-300)
            many = weights_of(mechanism, size, 16, settings.steps(500), generator)
            variance = (two[:, 0] / two[:, 1]).log().var().item() / 2
            jacobian = torch.diag_embed(many) - many[:, :, None] * many[:, None, :]
            slope = jacobian.flatten(1).norm(dim=-1).mean().item()
            row |= {f"variance, {name}": f"{variance:.2f}", f"gradient, {name}": f"{slope:.3f}"}
            lines[name].append((float(size), slope))
        rows.append(row)
    first, last = (dict(found) for found in lines.values())
    verdict, because = judged(
        all_of={
            "the variance is d, and 1 when scaled (within 15 %)": all(
                abs(float(str(row["variance, not scaled"])) / size - 1) < 0.15
                and abs(float(str(row["variance, scaled by 1/√d"])) - 1) < 0.15
                for row, size in zip(rows, SIZES, strict=True)
            ),
            "without scaling the gradient falls to less than half from d = 4 to 256": first[256] < first[4] / 2,
            "with it the gradient stays (within a fifth)": abs(last[256] / last[4] - 1) < 0.2,
        }
    )
    shown = Curves(title="Norm of the softmax's Jacobian", x="elements of a head", y="norm", lines=lines)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)


def performer(settings: Settings) -> Result:
    """CL-12: the error of Performer attention relative to exact attention, by the number of random features."""
    size, tokens = 16, 32
    rows: list[dict[str, object]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    exact = layer("mha", hidden_size=size, num_heads=1, causal=False).double()
    given = torch.randn(4, tokens, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    counts = (16, 64, 256, 1024)
    for features in counts:
        errors, sums = [], torch.zeros_like(given)
        draws = settings.steps(30)
        for seed in range(draws):
            torch.manual_seed(seed)
            drawn = layer(
                "performer", hidden_size=size, num_heads=1, causal=False, options={"features": features}
            ).double()
            drawn.load_state_dict(exact.state_dict(), strict=False)
            with torch.no_grad():
                out = drawn(given) - exact(given)
            sums += out
            errors.append(out.square().mean().sqrt().item())
        bias = (sums / draws).square().mean().sqrt().item()
        rows.append(
            {
                "features": features,
                "error (root mean square)": f"{mean(errors):.4f}",
                "of the mean of all draws": f"{bias:.4f}",
            }
        )
        lines.setdefault("one draw", []).append((float(features), mean(errors)))
        lines.setdefault("mean of the draws", []).append((float(features), bias))
    errors = [y for _, y in lines["one draw"]]
    biases = [y for _, y in lines["mean of the draws"]]
    verdict, because = judged(
        all_of={
            "the error falls as features grow, every time": all(a > b for a, b in pairwise(errors)),
            "sixty-four times as many features: less than a fifth of the error": errors[-1] < errors[0] / 5,
            "the mean of the draws is nearer to exact attention than one draw": all(
                bias < error for bias, error in zip(biases, errors, strict=True)
            ),
        }
    )
    shown = Curves(title="Performer", x="random features", y="error", lines=lines, logarithmic=True)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)
