"""A replacement for `torch.nn.MultiheadAttention` that computes any mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from attn_core import AttentionInputs, Capability, Mechanism, MechanismConfig, installed
from attn_core.checks import require_whole
from attn_core.errors import Incompatible, InvalidValue
from torch import Tensor, nn

from attn_variants.attention.layer import SpecLayer
from attn_variants.compute.dropout import with_dropout
from attn_variants.compute.plain import attention_weights, dropped, summed
from attn_variants.display import describe, summary
from attn_variants.functional import require_tensors
from attn_variants.layers import configured
from attn_variants.tensor_masks import kind_of, with_tensor

Result = tuple[Tensor, Tensor | None]
"""The outputs, and the attention weights if they were requested, else None."""


class Unfused(Tensor):
    """Stands for a parameter that PyTorch's fused operators need and this module does not have.

    A `torch.nn.TransformerEncoder` decides when it is built whether padded batches become nested tensors, and reads the
    parameters of its first layer when it is evaluated. Where one of them is an instance of a subclass of `Tensor`, it
    calls its layers with a padding mask instead.
    """


class MultiheadAttention(nn.Module):
    """Attention between `query`, `key` and `value`, with the interface of `torch.nn.MultiheadAttention`.

    As in PyTorch, and unlike everywhere else in attn, **True in a mask hides**: `key_padding_mask` is True where a key
    is padding, a bool `attn_mask` is True where a query may *not* attend to a key. Differences from PyTorch:

    - `batch_first` is True by default.
    - A query that may attend to no key gives zeros, not NaN.
    - `is_causal=True` needs no `attn_mask`. Queries are then aligned with the last keys.
    - State dicts of PyTorch's module (`in_proj_weight`, ...) can be loaded; this module saves other parameter names,
      which `attn_variants.replacement.torch_state_dict` turns back.

    Mechanisms that are computed from a spec alone (`Mechanism.spec`, the softmax family) accept every argument of
    `forward`. Others, such as "linear" or "mla", compute self-attention: `query`, `key` and `value` must be the same
    tensor (`key` and `value` for cross-attention), `attn_mask` must be None, a floating-point `key_padding_mask` may
    only hide keys (0 or -inf, as PyTorch's layers pass a bool mask on), and weights can be requested only if the
    mechanism has attention weights. Unsupported arguments raise `Incompatible`.

    Args:
        embed_dim: Size of queries and outputs.
        num_heads: Number of query heads, each of `embed_dim / num_heads` elements.
        dropout: The probability with which attention weights are set to zero in training.
        bias: Whether the projections have biases.
        add_bias_kv: Whether every query also attends to a learned key and value, `bias_k` and `bias_v`.
        add_zero_attn: Whether every query also attends to a key and value of zeros.
        kdim: Size of keys, `embed_dim` by default.
        vdim: Size of values, `embed_dim` by default.
        batch_first: Whether tensors are [batch, length, embed_dim], else [length, batch, embed_dim].
        mechanism: The name of the mechanism.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        **options: Further fields of the mechanism's config, such as `num_kv_heads` of "gqa" or `window` of
            "sliding_window". `causal` is False by default if the mechanism allows it, as masks are given per call.

    Raises:
        UnknownName: There is no mechanism, or no option, of this name.
        InvalidValue: A value is not allowed.
        Incompatible: The mechanism does not support `dropout`, or `kdim` or `vdim` other than `embed_dim`.
    """

    in_proj_bias = None
    _qkv_same_embed_dim = False
    """Read by `torch.nn.TransformerEncoderLayer`, which then calls this module instead of its fused operator."""

    in_proj_weight: ClassVar[Tensor] = Unfused()
    out_proj: ClassVar[SimpleNamespace] = SimpleNamespace(weight=in_proj_weight, bias=in_proj_weight)
    """Read by a `torch.nn.TransformerEncoder` that was built with other layers; see `Unfused`."""

    def __init__(  # noqa: PLR0913 -- the signature of torch's module
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,  # noqa: FBT001, FBT002 -- as torch's
        add_bias_kv: bool = False,  # noqa: FBT001, FBT002 -- as torch's
        add_zero_attn: bool = False,  # noqa: FBT001, FBT002 -- as torch's
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,  # noqa: FBT001, FBT002 -- as torch's
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str = "attn-variants/mha",
        **options: Any,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        require_whole("kdim", kdim, ge=1, optional=True)
        require_whole("vdim", vdim, ge=1, optional=True)
        self.kdim, self.vdim = (embed_dim if size is None else size for size in (kdim, vdim))
        if "hidden_size" in options:
            raise InvalidValue.of("hidden_size", options["hidden_size"], "none, as embed_dim gives the same size")
        self.mechanism: Mechanism = installed().mechanisms.get(mechanism)
        if self.mechanism.can(Capability.BIDIRECTIONAL):
            options = {"causal": False} | options
        self.config: MechanismConfig = configured(
            self.mechanism, **options, hidden_size=embed_dim, num_heads=num_heads, bias=bias, dropout=dropout
        )
        self.dropout = self.config.dropout
        self.attention: Any = self.mechanism.build(self.config)
        if (self.kdim, self.vdim) != (embed_dim, embed_dim):
            self._resize_inputs(bias=bias)
        self.add_zero_attn = add_zero_attn
        self._add_key_value(wanted=add_bias_kv)
        self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(load_torch_parameters)  # type: ignore[no-untyped-call]
        describe(self, self.mechanism, self.config)

    @property
    def takes_pairs(self) -> bool:
        """Whether the layer is a plain `SpecLayer` without an inner module, which can score any query-key pair."""
        return type(self.attention) is SpecLayer and self.attention.inner is None

    def forward(  # noqa: PLR0913 -- the signature of torch's module
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002 -- as torch's
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002 -- as torch's
        is_causal: bool = False,  # noqa: FBT001, FBT002 -- as torch's
    ) -> Result:
        """Compute attention outputs and, if requested, attention weights.

        Args:
            query: [batch, query_len, embed_dim]; [query_len, batch, embed_dim] unless `batch_first`; or, without a
                batch, [query_len, embed_dim].
            key: [batch, key_len, kdim], in the same layout.
            value: [batch, key_len, vdim], in the same layout.
            key_padding_mask: [batch, key_len], or [key_len] without a batch. Bool, **True where a key is padding** and
                gets no weight; or floating point, added to the scores.
            need_weights: Whether to return attention weights too. They are held for all query-key pairs: False is
                faster and takes less memory.
            attn_mask: [query_len, key_len] or [batch * num_heads, query_len, key_len]. Bool, **True where a query may
                not attend to a key**; or floating point, added to the scores.
            average_attn_weights: Whether to average the returned weights over the heads.
            is_causal: Whether attention is causal. Given with an `attn_mask`, it is a hint that the mask is causal.

        Returns:
            Outputs in the layout of `query`; and weights [batch, query_len, key_len] if averaged over heads, else
            [batch, num_heads, query_len, key_len], without the batch axis if the inputs have none, or None unless
            `need_weights`.

        Raises:
            InvalidValue: Shapes or dtypes do not match.
            Incompatible: The mechanism does not support these arguments.
        """
        same = Same(keys=key is query, values=value is key)
        require_tensors("[batch, length, embed_dim] or [length, embed_dim]", query=query, key=key, value=value)
        self._check_type(query)
        batched = query.dim() == 3
        query, key, value = (self._batch_first(name, rows, batched=batched) for name, rows in named(query, key, value))
        self._check_lengths(query, key, value)
        key_padding_mask = self._hiding(key_padding_mask)
        masks = Masks.of(key_padding_mask, attn_mask, (query.shape[0], self.num_heads, query.shape[1], key.shape[1]))
        masks = masks.with_hint(is_causal=is_causal)
        if self.takes_pairs:
            places, key_places = self.attention.positions(query, masks.key_padding_mask)
            operands = dataclasses.replace(
                self.attention.project_each(query, key, value),
                key_padding_mask=masks.key_padding_mask,
                query_positions=places,
                key_positions=key_places,
            )
            out, weights = self._attend_pairs(operands, masks, need_weights=need_weights)
        else:
            self._check_possible(same, masks, need_weights=need_weights)
            given = (query, key) if self.config.cross else (query,)
            out = self.attention(*given, key_padding_mask=masks.key_padding_mask)
            weights = self.attention.weights(*given, key_padding_mask=masks.key_padding_mask) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend_pairs(self, operands: AttentionInputs, masks: Masks, *, need_weights: bool) -> Result:
        layer = self.attention
        if self.bias_k is not None or self.add_zero_attn:
            operands, masks = self._with_added(operands, masks)
        kernels = layer.kernels.with_mask(is_causal=masks.is_causal)
        spec = with_tensor(kernels.spec, masks.mask)
        operands = with_dropout(operands, layer)
        weights = None
        if need_weights and operands.key.shape[1]:
            weights = dropped(operands, attention_weights(spec, operands))
            out = summed(spec, operands, weights)
            weights = weights.to(operands.value.dtype)
        else:
            out = kernels.with_mask(kind_of(masks.mask)).run(operands, spec)
            if need_weights:
                weights = operands.query.new_zeros(out.shape[0], spec.heads.query, out.shape[1], 0)
        return layer.output(out.flatten(-2)), weights

    def _check_type(self, query: Tensor) -> None:
        """Raise `InvalidValue` unless the query has the dtype of the parameters; not under autocast, which converts."""
        own = next(self.parameters(), query).dtype
        if query.dtype != own and not torch.is_autocast_enabled(query.device.type):
            raise InvalidValue.of("query.dtype", str(query.dtype), f"{own}, the dtype of the parameters")

    def _check_possible(self, same: Same, masks: Masks, *, need_weights: bool) -> None:
        """Raise `Incompatible` for arguments that a mechanism with a computation of its own does not support."""
        name, cross = self.mechanism.name, self.config.cross
        if not same.values or not (cross or same.keys):
            wanted = "key and value must be one tensor" if cross else "query, key and value must be one tensor"
            raise Incompatible(f"mechanism {name!r} applies its own projections: {wanted}", mechanism=name)
        if masks.mask is not None:
            message = f"mechanism {name!r} does not compute all pairs: attn_mask must be None, key_padding_mask bool"
            raise Incompatible(message, mechanism=name)
        if masks.is_causal and not self.config.causal:
            message = f"mechanism {name!r} was built with causal=False: build it with causal=True for is_causal=True"
            raise Incompatible(message, mechanism=name)
        if masks.key_padding_mask is not None and not self.mechanism.can(Capability.PADDING):
            raise Incompatible(f"mechanism {name!r} does not support key_padding_mask", mechanism=name)
        if need_weights and not self.mechanism.can(Capability.WEIGHTS):
            message = f"mechanism {name!r} has no attention weights: call it with need_weights=False"
            raise Incompatible(message, mechanism=name)

    def _hiding(self, padding: Tensor | None) -> Tensor | None:
        """The padding mask as bool, True where it hides, if it is of 0 and -inf and added to scores it would not do.

        PyTorch's layers turn bool masks into such masks. A mechanism with a computation of its own has no scores to
        add them to, and a mask or a position that depends on which keys are real has to know them. Raises
        `Incompatible` for other values where there are no scores.
        """
        added = self.takes_pairs and not (self.attention.spec.mask.by_length or self.attention.counts)
        if added or not isinstance(padding, Tensor) or not padding.is_floating_point():
            return padding
        hides = padding.isneginf()
        if bool((hides | (padding == 0)).all()):
            return hides
        if self.takes_pairs:
            return padding
        name = self.mechanism.name
        message = f"mechanism {name!r} adds nothing to scores: key_padding_mask must be bool, or only 0 and -inf"
        raise Incompatible(message, mechanism=name)

    def _batch_first(self, name: str, rows: Tensor, *, batched: bool) -> Tensor:
        if rows.dim() != (3 if batched else 2):
            allowed = "[batch, length, embed_dim] for query, key and value, or [length, embed_dim] for all"
            raise InvalidValue.of(name, tuple(rows.shape), allowed)
        if not batched:
            return rows[None]
        return rows if self.batch_first else rows.transpose(0, 1)

    def _check_lengths(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch, keys = query.shape[0], key.shape[1]
        for name, rows, wanted in (
            ("query", query, (batch, query.shape[1], self.embed_dim)),
            ("key", key, (batch, keys, self.kdim)),
            ("value", value, (batch, keys, self.vdim)),
        ):
            if tuple(rows.shape) != wanted:
                raise InvalidValue.of(f"{name}.shape", tuple(rows.shape), f"{wanted}, [batch, length, size]")

    def _add_key_value(self, *, wanted: bool) -> None:
        """Add the learned key and value; raises `Incompatible` where a query cannot attend to more than the keys."""
        self.bias_k = self.bias_v = None
        if (wanted or self.add_zero_attn) and not (self.takes_pairs and self.attention.spec.mask.kind == "full"):
            message = f"mechanism {self.mechanism.name!r} with its mask supports no add_bias_kv and no add_zero_attn"
            raise Incompatible(message, mechanism=self.mechanism.name)
        if wanted:
            heads = self.attention.spec.heads
            sizes = heads.key_value * heads.key_size, heads.key_value * heads.value_size
            self.bias_k, self.bias_v = (nn.Parameter(torch.empty(1, 1, size)) for size in sizes)
            for added in (self.bias_k, self.bias_v):
                nn.init.xavier_normal_(added)

    def _with_added(self, operands: AttentionInputs, masks: Masks) -> tuple[AttentionInputs, Masks]:
        """The inputs with the learned key and value and those of zeros, which every query may attend to."""
        key, value, (queries, keys) = operands.key, operands.value, (operands.query.shape[1], operands.key.shape[1])
        if masks.is_causal:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=key.device).tril(keys - queries)
            masks = masks._replace(mask=seen, is_causal=False)
        if self.bias_k is not None and self.bias_v is not None:
            learned = [
                bias.view(1, 1, *rows.shape[2:]).expand(rows.shape[0], 1, -1, -1).to(rows)
                for bias, rows in ((self.bias_k, key), (self.bias_v, value))
            ]
            key, value = torch.cat([key, learned[0]], dim=1), torch.cat([value, learned[1]], dim=1)
        if self.add_zero_attn:
            key, value = (nn.functional.pad(rows, (0, 0, 0, 0, 0, 1)) for rows in (key, value))
        count, padding, mask = key.shape[1] - keys, masks.key_padding_mask, masks.mask
        if padding is not None:
            padding = nn.functional.pad(padding, (0, count), value=True)
        if mask is not None:
            whole = mask.expand(*mask.shape[:-1], keys)
            mask = nn.functional.pad(whole, (0, count), value=whole.dtype == torch.bool)
        unplaced = dataclasses.replace(operands, query_positions=None, key_positions=None)
        changed = dataclasses.replace(unplaced, key=key, value=value, key_padding_mask=padding)
        return changed, Masks(padding, mask)

    def _resize_inputs(self, *, bias: bool) -> None:
        if not self.takes_pairs or self.attention.key is None:
            name = self.mechanism.name
            raise Incompatible(f"mechanism {name!r} supports only kdim and vdim equal to embed_dim", mechanism=name)
        self.attention.key = nn.Linear(self.kdim, self.attention.key.out_features, bias=bias)
        self.attention.value = nn.Linear(self.vdim, self.attention.value.out_features, bias=bias)
        self.attention.reset_parameters()

    def extra_repr(self) -> str:
        """The mechanism, heads and causality, for `repr`."""
        return summary(self.mechanism, self.config)


class Same(NamedTuple):
    """Whether `key` is the same tensor as `query`, and `value` the same as `key`."""

    keys: bool
    values: bool


class Masks(NamedTuple):
    """The masks of a call in the convention of attn: True means that a key may be attended to.

    `key_padding_mask` [batch, key_len] is a bool padding mask; `mask` is bool or an additive bias and broadcasts to
    [batch, num_heads, query_len, key_len].
    """

    key_padding_mask: Tensor | None
    mask: Tensor | None
    is_causal: bool = False

    @classmethod
    def of(cls, padding: Tensor | None, mask: Tensor | None, shape: tuple[int, int, int, int]) -> Masks:
        """Convert PyTorch's masks for scores of `shape`, [batch, num_heads, query_len, key_len].

        Raises `InvalidValue` for masks of other shapes or dtypes.
        """
        batch, heads, queries, keys = shape
        if padding is not None:
            if getattr(padding, "ndim", None) == 1 and batch == 1:
                padding = padding[None]
            check_mask("key_padding_mask", padding, [(batch, keys)])
        if mask is not None:
            check_mask("attn_mask", mask, [(queries, keys), (batch * heads, queries, keys)])
            mask = mask.view(batch, heads, queries, keys) if mask.dim() == 3 else mask
            mask = ~mask if mask.dtype == torch.bool else mask
        if padding is None or padding.dtype == torch.bool:
            return cls(None if padding is None else ~padding, mask)
        bias = padding[:, None, None, :]
        if mask is not None and mask.dtype == torch.bool:
            return cls(None, bias.masked_fill(~mask, -torch.inf))
        return cls(None, bias if mask is None else bias + mask)

    def with_hint(self, *, is_causal: bool) -> Masks:
        """Apply the `is_causal` argument: a square 2-D mask declared causal is replaced by the causal rule.

        A mask of another shape is kept, without the rule.
        """
        if not is_causal or self.mask is None:
            return self._replace(is_causal=is_causal)
        square = self.mask.dim() == 2 and self.mask.shape[0] == self.mask.shape[1]
        return self._replace(mask=None, is_causal=True) if square else self


def named(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[str, Tensor]]:
    """The inputs with their names, for error messages."""
    return [("query", query), ("key", key), ("value", value)]


def check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Raise `InvalidValue` unless the mask is bool or floating point and has one of these shapes."""
    if not isinstance(mask, Tensor):
        raise InvalidValue.of(name, type(mask).__name__, "a tensor or None")
    if tuple(mask.shape) not in shapes:
        raise InvalidValue.of(f"{name}.shape", tuple(mask.shape), " or ".join(map(str, shapes)))
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise InvalidValue.of(f"{name}.dtype", str(mask.dtype), "torch.bool (True hides) or a floating-point bias")


TORCH_NAMES: Mapping[str, str] = {
    "q_proj_weight": "attention.query.weight",
    "k_proj_weight": "attention.key.weight",
    "v_proj_weight": "attention.value.weight",
    "out_proj.weight": "attention.output.weight",
    "out_proj.bias": "attention.output.bias",
}
"""Maps the names of parameters of `torch.nn.MultiheadAttention` to the names of the same parameters here."""


def load_torch_parameters(module: MultiheadAttention, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Rename and split any parameters of a `torch.nn.MultiheadAttention` in `state_dict`.

    A pre-hook of `load_state_dict`; the last of `others` is its list of error messages.
    """
    errors: list[str] = others[-1]
    for theirs, ours in TORCH_NAMES.items():
        if prefix + theirs in state_dict:
            state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
    for kind in ("weight", "bias"):
        joint = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        if joint is None:
            continue
        parts = {name: getattr(module.attention, name, None) for name in ("query", "key", "value")}
        sizes = [part.out_features for part in parts.values() if isinstance(part, nn.Linear)]
        if len(sizes) != 3 or sum(sizes) != joint.shape[0]:
            needed = f"{sizes} for query, key and value in mechanism {module.mechanism.name!r}"
            errors.append(f"{prefix}in_proj_{kind} has {joint.shape[0]} rows, not {needed}")
            continue
        for name, part in zip(parts, joint.split(sizes), strict=True):
            state_dict[f"{prefix}attention.{name}.{kind}"] = part
