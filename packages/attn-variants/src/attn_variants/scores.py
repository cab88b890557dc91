"""Score functions of queries and keys: scaled dot product, general, additive, concat, cosine and location."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attn_core import Heads
from attn_core.errors import InvalidValue
from attn_core.masking import of_query_heads, wide
from attn_core.scores import Additive, Concat, Cosine, ScaledDot, Score
from torch import Tensor
from torch.nn.functional import softplus

from attn_variants.compute.pairs import Pairs

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}
"""The activations of `attn_core.scores.ACTIVATIONS`."""
PIECE = 1 << 24
"""The largest number of elements of the hidden layer of all pairs that is held at once when no gradient is needed."""


def init_additive(score: Additive, heads: Heads) -> dict[str, Tensor]:
    """Initial W_q [heads, key_size, units], W_k [num_kv_heads, key_size, units], b and v [heads, units].

    W are drawn from N(0, 0.001²) and b is zero as in Bahdanau et al. 2015, appendix B.1. There v is zero too, so that
    W gets no gradient in the first step; here v is uniform in ±1/√units, and all weights learn from the start.
    """
    units = score.units(heads)
    return {
        "query_weight": torch.randn(heads.query, heads.key_size, units) * 0.001,
        "key_weight": torch.randn(heads.key_value, heads.key_size, units) * 0.001,
        "bias": torch.zeros(heads.query, units),
        "vector": init_vector(heads.query, units),
    }


def init_concat(score: Concat, heads: Heads) -> dict[str, Tensor]:
    """Initial W = [W_k | W_q], uniform in ±0.1 as in the code of Luong et al. 2015, b = 0 and v of `init_vector`."""
    units = score.units(heads)
    of_key, of_query = ((torch.rand(heads.query, 2 * heads.key_size, units) * 2 - 1) * 0.1).chunk(2, dim=1)
    return {
        "query_weight": of_query.contiguous(),
        "key_weight": of_key.contiguous(),
        "bias": torch.zeros(heads.query, units),
        "vector": init_vector(heads.query, units),
    }


def init_vector(heads: int, units: int) -> Tensor:
    """Initial v [heads, units], uniform in ±1/√units."""
    drawn: Tensor = (torch.rand(heads, units) * 2 - 1) * units**-0.5
    return drawn


def projected_keys(heads: Heads, key: Tensor, weight: Tensor) -> Tensor:
    """W_k k, [..., key, heads of W_k, units], for keys [..., key, num_kv_heads, key_size], in the dtype of the keys.

    W_k is [num_kv_heads or heads, key_size, units]. Additive and concat scores take these in place of keys.
    """
    if weight.shape[0] != heads.key_value:
        key = key[..., list(heads.group_of), :]
    rows = wide(key)
    return torch.einsum("...hd,hdu->...hu", rows, weight.to(rows.dtype)).to(key.dtype)


def additive_scores(
    heads: Heads, query: Tensor, key: Tensor, parameters: Mapping[str, Tensor], activation: str = "tanh"
) -> Tensor:
    """Scores vᵀ tanh(W_q q + W_k k + b), [batch, heads, query, key], or with another of `ACTIVATIONS`.

    Queries are [batch, heads, query, key_size], keys [batch, num_kv_heads, key, key_size] or, without `key_weight` in
    the parameters, already projected [batch, num_kv_heads, key, units].
    """
    hidden_query = torch.matmul(query, parameters["query_weight"]) + parameters["bias"][:, None, :]
    hidden_key = torch.matmul(key, parameters["key_weight"]) if "key_weight" in parameters else key
    return _all_scores(hidden_query, of_query_heads(heads, hidden_key), parameters["vector"], activation)


def concat_scores(
    heads: Heads, query: Tensor, key: Tensor, parameters: Mapping[str, Tensor], activation: str = "tanh"
) -> Tensor:
    """Scores vᵀ tanh(W [k; q] + b); shapes as in `additive_scores`, but projected keys have one head per query head.

    W [k; q] is computed as W_k k + W_q q.
    """
    hidden_query = torch.matmul(query, parameters["query_weight"]) + parameters["bias"][:, None, :]
    own = "key_weight" in parameters
    hidden_key = torch.matmul(of_query_heads(heads, key), parameters["key_weight"]) if own else key
    return _all_scores(hidden_query, hidden_key, parameters["vector"], activation)


def _all_scores(hidden_query: Tensor, hidden_key: Tensor, vector: Tensor, activation: str) -> Tensor:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _pair_scores(hidden_query, hidden_key, vector, activation)
    rows = max(1, PIECE // max(1, hidden_key.numel()))
    pieces = [_pair_scores(piece, hidden_key, vector, activation) for piece in torch.split(hidden_query, rows, dim=2)]
    return torch.cat(pieces, dim=2)


def _pair_scores(query: Tensor, key: Tensor, vector: Tensor, activation: str) -> Tensor:
    hidden = ACTIVATIONS[activation](query[:, :, :, None, :] + key[:, :, None, :, :])
    return torch.matmul(hidden, vector[:, None, :, None]).squeeze(-1)


def cosine_scores(query: Tensor, key: Tensor, beta: Tensor | float, eps: float) -> Tensor:
    """β q·k / (‖q‖‖k‖ + eps), [batch, heads, query, key].

    `query` [batch, heads, query, key_size], `key` [batch, heads, key, key_size], `beta` a number or [heads, 1, 1].
    """
    norms = torch.linalg.vector_norm(query, dim=-1)[..., :, None] * torch.linalg.vector_norm(key, dim=-1)[..., None, :]
    products = torch.matmul(query, key.transpose(-1, -2))
    scores: Tensor = beta * products / (norms + eps)
    return scores


def location_scores(query: Tensor, weight: Tensor, keys: int, positions: Tensor | None) -> Tensor:
    """(W q)_j for the positions j of the keys, [batch, heads, query, key].

    `query` [batch, heads, query, key_size], `weight` [heads, longest, key_size]; `positions` [batch or 1, key] are
    those of the keys, by default 0 to `keys` - 1. Raises `InvalidValue` for positions of `longest` or more.
    """
    longest = weight.shape[1]
    if positions is None:
        if keys > longest:
            raise InvalidValue.of(
                "key", f"{keys} keys", f"at most {longest}, the number of rows of the location weight"
            )
        return torch.matmul(query, weight[:, :keys].transpose(-1, -2))
    # A compiled graph cannot read a position; there index_select itself fails for one out of range.
    if positions.numel() and not torch.compiler.is_compiling() and int(positions.max()) >= longest:
        given = f"a key at position {int(positions.max())}"
        raise InvalidValue.of("key", given, f"positions below {longest}, the number of rows of the location weight")
    rows = torch.unflatten(weight.index_select(1, positions.flatten()), 1, positions.shape)
    return torch.matmul(query, rows.transpose(0, 1).transpose(-1, -2))


def scores(pairs: Pairs) -> Tensor:
    """The scores [batch, heads, query, key] of the spec's score function."""
    score, heads, query, key = pairs.spec.score, pairs.spec.heads, pairs.query, pairs.key
    weights = pairs.weights("score")
    if isinstance(score, Additive):
        return additive_scores(heads, query, key, weights, score.activation)
    if isinstance(score, Concat):
        return concat_scores(heads, query, key, weights, score.activation)
    if score.kind == "location":
        return location_scores(query, weights["weight"], key.shape[-2], pairs.operands.key_positions)
    if isinstance(score, Cosine):
        beta = softplus(weights["sharpness"])[:, None, None] if score.beta is None else score.beta
        return cosine_scores(query, of_query_heads(heads, key), beta, score.eps)
    if score.kind == "general":
        query = torch.matmul(query, weights["weight"])
    elif score.kind == "scaled_dot":
        query = query * scale_of(score, query.shape[-1])
    elif score.kind != "dot":
        raise InvalidValue.of("score", score.kind, "scaled_dot, dot, general, cosine, additive, concat, location")
    return torch.matmul(query, of_query_heads(heads, key).transpose(-1, -2))


def scale_of(score: Score, size: int) -> float:
    """The factor of query-key products: the scale of a `ScaledDot`, by default 1/√d_k; 1 for other scores."""
    if not isinstance(score, ScaledDot):
        return 1.0
    return float(size) ** -0.5 if score.scale is None else score.scale
