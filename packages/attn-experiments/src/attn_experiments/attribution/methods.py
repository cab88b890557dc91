"""The contribution of each input token to an output: integrated gradients, Shapley values, attention, rollout.

Integrated gradients and sampled Shapley values are computed by captum; attention and rollout use the weights of the
model's own layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.attention import recorded_weights
from torch import Tensor, nn

Score = Callable[[Tensor], Tensor]
"""Computes one number [batch] for each input from embedded tokens [batch, tokens, width]."""
EXACT = 10
"""The maximum number of tokens for which Shapley values are computed exactly, over all subsets."""


@contextmanager
def replaced_embeddings(embedding: nn.Embedding, rows: Tensor) -> Iterator[None]:
    """Context in which the embedding layer returns `rows` [batch, tokens, width] for any input."""
    handle = embedding.register_forward_hook(lambda _module, _args, _out: rows)
    try:
        yield
    finally:
        handle.remove()


def embedding_of(model: nn.Module) -> nn.Embedding:
    """The token embedding layer of a model; raises `Incompatible` if it has none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] == "embedding":
            return module
    raise Incompatible(f"{type(model).__name__} has no token embedding to attribute to")


def next_token_score(model: nn.Module, tokens: Tensor, target: int) -> Score:
    """The log-probability of the token `target` after tokens [tokens], as a function of their embeddings."""
    return _log_probability(model, tokens, -1, target)


def label_score(model: nn.Module, tokens: Tensor, label: int) -> Score:
    """The log-probability of a text classifier's `label` of tokens [tokens], as a function of their embeddings."""
    return _log_probability(model, tokens, 0, label)


def _log_probability(model: nn.Module, tokens: Tensor, row: int, target: int) -> Score:
    """The log-probability of the class `target` in a row of the logits [batch, rows, classes]."""
    embedding = embedding_of(model)

    def score(rows: Tensor) -> Tensor:
        with replaced_embeddings(embedding, rows):
            logits = model(tokens[None].expand(len(rows), -1))
        return torch.log_softmax(logits[:, row].float(), -1)[:, target]

    return score


class Attribution(NamedTuple):
    """The contribution of each token [tokens], and the completeness error |Σ - ΔF|: the distance of the contributions'
    sum from the difference of the outputs for the input and for the baseline.
    """

    shares: Tensor
    missing: float


ALLOWED_ERROR = 0.05
"""The largest completeness error of `converged_gradients`, as a part of ΔF."""
STEPS = (128, 256, 512)
"""The numbers of gradients that `converged_gradients` tries."""


def mean_embedding(model: nn.Module, tokens: Tensor) -> Tensor:
    """A baseline that says nothing: the mean of all embeddings in the place of each token, [tokens, width].

    Zeros would be a poor one: a normalization by the root mean square turns rows of any length into rows of one length,
    so that all of the output changes within a small step from zero, which no quadrature follows.
    """
    rows = embedding_of(model).weight.detach().mean(0)
    return rows.expand(len(tokens), -1).contiguous()


def converged_gradients(score: Score, rows: Tensor, baseline: Tensor) -> Attribution:
    """`integrated_gradients` with as many steps as it takes for the contributions to sum to ΔF.

    Raises `Incompatible` if the error exceeds `ALLOWED_ERROR` of ΔF with the most `STEPS`.
    """
    with torch.no_grad():
        change = abs(float(score(rows[None]) - score(baseline[None])))
    missing = math.inf
    for steps in STEPS:
        found = integrated_gradients(score, rows, baseline, steps)
        missing = found.missing
        if missing <= ALLOWED_ERROR * change:
            return found
    raise Incompatible(
        f"integrated gradients did not converge in {STEPS[-1]} steps: the output changes by {change:.3g}, and the "
        f"contributions miss {missing:.3g} of it (allowed: {ALLOWED_ERROR:.0%}); use another method",
        method="integrated_gradients",
    )


def integrated_gradients(score: Score, rows: Tensor, baseline: Tensor, steps: int = 64) -> Attribution:
    """(x - x') ∫ ∂F/∂x along the line from the baseline (Sundararajan et al. 2017, arXiv 1703.01365), by captum.

    `rows` and `baseline` are embedded tokens [tokens, width]; a token's contribution is the sum over its width. The
    integral is approximated by Gauss-Legendre quadrature with `steps` gradients.
    """
    from captum.attr import IntegratedGradients

    method = IntegratedGradients(score)
    found, delta = method.attribute(
        rows[None].detach(),
        baselines=baseline[None].detach(),
        n_steps=steps,
        internal_batch_size=16,
        return_convergence_delta=True,
    )
    return Attribution(found[0].sum(-1).detach(), abs(float(delta[0])))


def shapley_values(score: Score, rows: Tensor, baseline: Tensor, *, samples: int = 512, seed: int = 0) -> Attribution:
    """Each token's mean contribution over all orders of adding tokens (Lundberg and Lee 2017, arXiv 1705.07874).

    A token that has not been added is replaced by its row of the baseline. Exact up to `EXACT` tokens, over all
    subsets; for more tokens, captum samples random orders, with about `samples` subsets.
    """

    def of_subsets(present: Tensor) -> Tensor:
        joined = present[..., None].to(rows.dtype)
        found = [score(joined[part] * rows + (1 - joined[part]) * baseline) for part in batches(len(present))]
        return torch.cat(found).detach()

    tokens = len(rows)
    with torch.no_grad():
        ends = of_subsets(torch.tensor([[False] * tokens, [True] * tokens]))
        if tokens <= EXACT:
            shares = exact_shapley(of_subsets, tokens).to(rows.dtype)
        else:
            shares = sampled_shapley(of_subsets, tokens, samples, seed)
    return Attribution(shares, abs(float(shares.sum() - (ends[1] - ends[0]))))


def batches(count: int, size: int = 64) -> Iterator[slice]:
    """Slices of at most `size` elements that cover `count` elements."""
    return (slice(start, start + size) for start in range(0, count, size))


def exact_shapley(value: Callable[[Tensor], Tensor], players: int) -> Tensor:
    """Σ over subsets S without i of |S|! (n - |S| - 1)! / n! times v(S + i) - v(S), float64 [players].

    `value` takes subsets [subsets, players], bool, and returns a number for each. All 2^players subsets are evaluated.
    """
    subsets = torch.tensor(list(itertools.product([False, True], repeat=players)))
    worth, sizes = value(subsets).double(), subsets.sum(1)
    places = 2 ** torch.arange(players - 1, -1, -1)
    shares = []
    for player in range(players):
        without = (~subsets[:, player]).nonzero()[:, 0]
        weight = torch.tensor(
            [math.factorial(s) * math.factorial(players - s - 1) for s in sizes[without].tolist()], dtype=torch.float64
        ) / math.factorial(players)
        shares.append((weight * (worth[without + places[player]] - worth[without])).sum())
    return torch.stack(shares)


def sampled_shapley(value: Callable[[Tensor], Tensor], players: int, samples: int, seed: int) -> Tensor:
    """An unbiased estimate of the Shapley values over random orders of the players, by captum.

    About `samples` subsets are evaluated, at least one whole order. For any orders, the values sum to v(all) - v(none).
    """
    from captum.attr import ShapleyValueSampling

    def of_masks(mask: Tensor) -> Tensor:
        return value(mask > 0.5)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found: Tensor = ShapleyValueSampling(of_masks).attribute(
            torch.ones(1, players),
            baselines=torch.zeros(1, players),
            n_samples=max(1, samples // players),
            perturbations_per_eval=64,
        )
    return found[0]


def attention_maps(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """The attention weights [heads, query, key] of every layer for tokens [tokens].

    Raises `Incompatible` for a model without attention layers.
    """
    with torch.no_grad(), recorded_weights(model) as maps:
        model(tokens[None])
    if not maps:
        raise Incompatible(f"{type(model).__name__} has no attention layers")
    return [found[0] for found in maps]


def rollout(maps: list[Tensor]) -> Tensor:
    """Attention rollout [query, key]: the product over layers of (A + I) / 2, with A the mean over heads.

    Rows are normalised to sum to 1; the identity represents the residual connection (Abnar and Zuidema 2020, arXiv
    2005.00928, section 3). Raises `InvalidValue` unless all layers have square weights of the same size.
    """
    if not maps or any(found.shape[-1] != found.shape[-2] or found.shape[1:] != maps[0].shape[1:] for found in maps):
        shapes = [list(found.shape) for found in maps]
        raise InvalidValue.of("maps", shapes, "one or more layers [heads, tokens, tokens] of as many tokens")
    flow = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    for found in maps:
        mixed = (found.mean(0) + torch.eye(len(flow), dtype=flow.dtype)) / 2
        flow = mixed / mixed.sum(-1, keepdim=True) @ flow
    return flow
