"""Attention over projected queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Heads, Mask
from attn_core.checks import require_number
from attn_core.distributions import Distribution, Softmax
from attn_core.errors import InvalidValue
from attn_core.modifiers import Modifier
from attn_core.scores import ScaledDot, Score
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attn_variants.attention.kernels import AttentionKernels
from attn_variants.compute.dropout import new_dropout
from attn_variants.tensor_masks import causal_mask, kind_of, with_tensor

LAYOUT = "[batch, num_heads, length, head_dim] or [num_heads, length, head_dim]"


def attend(  # noqa: PLR0913 -- the signature of torch's scaled_dot_product_attention, and what it lacks
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 -- as torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 -- as torch's
    *,
    score: Score | None = None,
    modifiers: Sequence[Modifier] = (),
    distribution: Distribution | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    key_padding_mask: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Compute attention with any score, modifiers, mask and distribution, by the cheapest kernel that supports them.

    Tensors have the layout of `torch.nn.functional.scaled_dot_product_attention`:

    - `query` [batch, num_heads, query_len, head_dim],
    - `key` [batch, num_kv_heads, key_len, head_dim],
    - `value` [batch, num_kv_heads, key_len, value_dim],
    - the result [batch, num_heads, query_len, value_dim], in the dtype of `value`.

    Inputs without a batch axis ([num_heads, query_len, head_dim] and so on) give a result without one. 16-bit inputs
    are computed in float32. The output of a query that may attend to no key is zero.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        attn_mask: A mask of `attn_core`, such as `Causal()`, `Window(left=255)` or `Causal() & Segments(...)`; or a
            tensor that broadcasts to [batch, num_heads, query_len, key_len]: bool, True where a query may attend to a
            key, or floating point, added to the scores.
        score: The scoring function; `ScaledDot()` by default.
        modifiers: Changes to the scores, applied in order: `Alibi()`, `SoftCap(cap=50.0)`, ...
        distribution: The function that turns scores into attention weights; `Softmax()` by default.
        parameters: The learned tensors of score, modifiers and distribution, named as in `AttentionSpec.weights`, such
            as {"distribution.logit": ...} [num_heads] for `SoftmaxWithSink()`.
        key_padding_mask: Bool [batch, key_len], or [key_len] without a batch axis; True where a key is real.
        dropout_p: The probability with which attention weights are set to zero. As in PyTorch, it applies whenever it
            is above 0: pass 0 in evaluation.
        is_causal: The same as `attn_mask=Causal()`; may be combined with another mask. Queries are aligned with the
            last keys: query i of n over S keys attends to keys 0 to S - n + i. PyTorch aligns them with the first keys,
            which is the same if there are as many queries as keys.
        scale: The factor of the query-key products, 1/√head_dim by default. Only without `score`; a score of
            `ScaledDot(scale=...)` has its own.
        enable_gqa: Whether there may be fewer key/value heads than query heads.
        kernel: The name of the kernel to use, as listed by `attn explain`; the cheapest by default.

    Returns:
        The output [batch, num_heads, query_len, value_dim].

    Raises:
        InvalidValue: Shapes or dtypes do not match, or parameters are missing.
        KernelRefused: The kernel given by name does not support the call.
    """
    require_tensors(LAYOUT, query=query, key=key, value=value)
    require_number("dropout_p", dropout_p, ge=0, le=1)
    batched = query.dim() == 4
    if not batched:
        query, key, value = (rows[None] if rows.dim() == 3 else rows for rows in (query, key, value))
        if isinstance(key_padding_mask, Tensor) and key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask[None]
    require_heads(query, key, value, enable_gqa=enable_gqa)
    if isinstance(attn_mask, CausalBias):
        attn_mask = plain_mask(attn_mask, query.device)
    given = attn_mask if isinstance(attn_mask, Tensor) else None
    if given is not None:
        given = broadcastable_mask(given, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
    rule = attn_mask if given is None else None
    sizes = tuple(constant(size) for size in (query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
    # Modifiers come last, one by one: torch.compile takes no tuple of them for a constant.
    asked = score_or_scale(score, scale), distribution, rule
    parts: tuple[Any, ...] = *asked, sizes, is_causal, kernel, *tuple_of(modifiers)
    kernels = getattr(KNOWN, known_as(*parts)) if torch.compiler.is_compiling() else kernels_of(*parts)
    operands = AttentionInputs(
        query=query.transpose(1, 2),
        key=key.transpose(1, 2),
        value=value.transpose(1, 2),
        key_padding_mask=checked_padding(key_padding_mask, key),
        parameters=checked_parameters(kernels.weights, parameters or {}),
        dropout=new_dropout(dropout_p) if dropout_p else None,
    )
    out = kernels.with_mask(kind_of(given)).run(operands, with_tensor(kernels.spec, given)).transpose(1, 2)
    return out if batched else out[0]


def constant(size: int) -> int:
    """A size as a constant of the graph where torch.compile traces sizes as symbols."""
    return len(range(size)) if torch.compiler.is_compiling() else size


def kernels_of(
    score: Score | float | None,
    distribution: Distribution | None,
    mask: Mask | None,
    sizes: tuple[int, ...],
    is_causal: bool,  # noqa: FBT001 -- as torch's
    name: str | None,
    *modifiers: Modifier,
) -> AttentionKernels:
    """The kernels of a call of `attend` under a mask of `attn_core`, or only the kernel called `name`.

    A number as `score` is the scale of the default, and `sizes` are the four of `Heads`. Raises `InvalidValue` for a
    part of a wrong class.
    """
    score = ScaledDot(scale=score) if score is None or isinstance(score, int | float) else score
    distribution = distribution or Softmax()
    kinds = [("score", score, Score), ("distribution", distribution, Distribution)]
    for field, part, kind in [*kinds, *(("modifiers", modifier, Modifier) for modifier in modifiers)]:
        if not isinstance(part, kind):
            raise InvalidValue.of(field, part, f"instances of {kind.__module__}.{kind.__qualname__}")
    if mask is not None and not isinstance(mask, Mask):
        raise InvalidValue.of("attn_mask", type(mask).__name__, "a mask of attn_core, a tensor or None")
    query, key_value, key_size, value_size = sizes
    heads = Heads(query=query, key_value=key_value, key_size=key_size, value_size=value_size)
    found = causal_mask(mask, is_causal=is_causal)
    spec = AttentionSpec(heads=heads, score=score, modifiers=modifiers, mask=found, distribution=distribution)
    return cached_kernels(spec, name)


cached_kernels = lru_cache(maxsize=256)(AttentionKernels)


class Known:
    """Holds the kernels of compiled calls as attributes: a graph then guards its own, and no others."""


KNOWN = Known()


def known_as(*parts: Any) -> str:
    """The attribute of `KNOWN` with the kernels of these parts of a call."""
    kernels = kernels_of(*parts)
    known = f"kernels_{id(kernels)}"
    setattr(KNOWN, known, kernels)
    return known


# torch.compile calls it while tracing and keeps its result as a constant, as for `Operation.index`.
known_as._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def tuple_of(modifiers: Sequence[Modifier]) -> tuple[Modifier, ...]:
    """The modifiers as a tuple; raises `InvalidValue` for anything but a list or tuple."""
    if not isinstance(modifiers, (list, tuple)):
        raise InvalidValue.of("modifiers", modifiers, "a list of modifiers")
    return tuple(modifiers)


def score_or_scale(score: Score | None, scale: float | None) -> Score | float | None:
    """The score, or the scale of the default score; raises `InvalidValue` if both are given."""
    require_number("scale", scale, optional=True)
    if score is not None and scale is not None:
        named = getattr(score, "kind", score)
        allowed = f"None together with a score, here {named!r}; ScaledDot(scale=...) sets a scale"
        raise InvalidValue.of("scale", scale, allowed)
    return scale if score is None else score


def require_tensors(layout: str, **tensors: Tensor) -> None:
    """Raise `InvalidValue` unless all are floating-point tensors of one device and, outside autocast, one dtype."""
    first: Tensor | None = None
    for name, rows in tensors.items():
        if not isinstance(rows, Tensor):
            raise InvalidValue.of(name, type(rows).__name__, f"a tensor {layout}")
        if rows.is_nested:
            raise InvalidValue.of(name, "a nested tensor", f"a padded tensor {layout}, with a key_padding_mask")
        first = rows if first is None else first
        mixed = rows.dtype != first.dtype and not torch.is_autocast_enabled(rows.device.type)
        if mixed or not rows.dtype.is_floating_point:
            allowed = f"{first.dtype}, the dtype of the other tensors" if mixed else "a floating-point type"
            raise InvalidValue.of(f"{name}.dtype", str(rows.dtype), allowed)
        if rows.device != first.device:
            raise InvalidValue.of(
                f"{name}.device", str(rows.device), f"{first.device}, the device of the other tensors"
            )


def plain_mask(mask: CausalBias, device: torch.device) -> Tensor:
    """The bool mask [query_len, key_len] that a `torch.nn.attention.bias.CausalBias` stands for.

    Its data are not the mask but the two lengths, and its `shape` is that of neither.
    """
    causal = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device)
    lower = mask.variant is CausalVariant.LOWER_RIGHT
    return causal.tril(mask.seq_len_kv - mask.seq_len_q if lower else 0)


def broadcastable_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask, reshaped to at least two axes; raises `InvalidValue` unless it broadcasts to `shape`."""
    fits = mask.dim() <= 4 and all(
        given in {1, wanted} for given, wanted in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        allowed = f"a shape that broadcasts to [batch, num_heads, query_len, key_len] = {list(shape)}"
        raise InvalidValue.of("attn_mask.shape", tuple(mask.shape), allowed)
    return mask.reshape((1,) * (2 - mask.dim()) + tuple(mask.shape))


def require_heads(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> None:
    """Raise `InvalidValue` unless the shapes of the tensors match."""
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if rows.dim() != 4:
            raise InvalidValue.of(name, tuple(rows.shape), f"{LAYOUT}, all with a batch or all without")
    checks: list[tuple[str, Tensor, bool, str]] = [
        ("key", key, key.shape[0] == query.shape[0], f"batch size {query.shape[0]}, as in query"),
        ("key", key, key.shape[3] == query.shape[3], f"head_dim {query.shape[3]}, as in query"),
        ("value", value, value.shape[:3] == key.shape[:3], f"[batch, num_kv_heads, key_len] = {list(key.shape[:3])}"),
    ]
    for name, rows, fits, allowed in checks:
        if not fits:
            raise InvalidValue.of(f"{name}.shape", tuple(rows.shape), allowed)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        allowed = f"{query.shape[1]} heads, as in query; fewer with enable_gqa=True"
        raise InvalidValue.of("key.shape", tuple(key.shape), allowed)


def checked_padding(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The padding mask; raises `InvalidValue` unless it is bool [batch, key_len] for keys [batch, ..., key_len, _]."""
    wanted = (key.shape[0], key.shape[2])
    allowed = f"torch.bool {list(wanted)}, [batch, key_len], True for keys that are not padding"
    if mask is not None and not isinstance(mask, Tensor):
        raise InvalidValue.of("key_padding_mask", type(mask).__name__, allowed)
    if mask is not None and (tuple(mask.shape) != wanted or mask.dtype != torch.bool):
        raise InvalidValue.of("key_padding_mask", f"{mask.dtype} {list(mask.shape)}", allowed)
    return mask


def checked_parameters(
    weights: tuple[tuple[str, tuple[int, ...]], ...], given: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The learned tensors of a call; raises `InvalidValue` unless they have these names and shapes, those of a spec."""
    shapes = {name: tuple(getattr(tensor, "shape", ("no tensor",))) for name, tensor in given.items()}
    if len(shapes) != len(weights) or any(shapes.get(name) != shape for name, shape in weights):
        raise InvalidValue.of("parameters", shapes, f"{dict(weights)}, the names and shapes of the spec")
    return given
