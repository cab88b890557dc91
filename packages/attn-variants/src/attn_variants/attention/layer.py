"""The layer that computes any `AttentionSpec`: projections, rotary embedding, attention kernel, output projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from attn_core import AttentionInputs, AttentionSpec, Fields, Full, Heads, InnerAttention, LayerState, RaggedBatch
from attn_core.batch import RowsInPlace
from attn_core.checks import require_no_module
from attn_core.errors import Incompatible, InvalidValue
from attn_core.inner import require_plain
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.block import AttentionParts
from torch import Tensor, nn

from attn_variants.attention.documents import forward_documents
from attn_variants.attention.intermediates import Intermediates, intermediates_of
from attn_variants.attention.kernels import AttentionKernels, InPlaceAttention, PagedKernels
from attn_variants.attention.projections import Projections, named_weights, part_weights
from attn_variants.attention.step import attend_ragged, cos_sin_of_batch
from attn_variants.compute.dropout import with_dropout
from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import CosSin, cos_sin_to, rotated_size
from attn_variants.context_parallel import ContextParallel, Striped, require_context_parallel
from attn_variants.scores import projected_keys

KEY_WEIGHT = "score.key_weight"
"""The name of the weight by which additive and concat scores project keys; applied by the layer, not by the kernel."""


class SpecLayer(Projections):
    """An attention layer that computes a spec over inputs of `hidden_size`.

    Learned parameters: those of `Projections` and, if the parts of the spec have weights of their own, `score`,
    `modifiers` by kind and `distribution`. The module `inner`, if given, computes attention between the projections and
    the output. With `shares_kv` the layer attends to the keys and values of another layer. `context`, if set and
    active, splits the tokens of a sequence over ranks (context parallelism). `dropout` is the probability with which
    attention weights are set to zero when training on whole sequences. `counts` says that it attends to a source and
    needs positions, which are counted from the first real token of each.

    Subclasses that compute more than the spec clear `only_spec`; those whose attention no kernel computes set
    `computes_itself`, as inner modules do; those that give kernels positions of their own, which would count from the
    first row of the first of several documents, set `own_positions`.
    """

    only_spec: ClassVar[bool] = True
    own_positions: ClassVar[bool] = False
    computes_itself: ClassVar[bool] = False
    splits_tokens: ClassVar[bool] = True

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        hidden_size: int,
        bias: bool,
        inner: InnerAttention | None = None,
        shares_kv: bool = False,
        projected: Heads | None = None,
        dropout: float = 0.0,
    ) -> None:
        for place, part in spec.parts.items():
            require_no_module(place, part)
        heads = spec.heads
        super().__init__(spec, hidden_size=hidden_size, bias=bias, shares_kv=shares_kv, projected=projected)
        self.dropout = dropout
        self.takes_lengths = not spec.cross
        self.score = part_weights(spec.score, heads, without="key_weight" if shares_kv else None)
        modifiers = {modifier.kind: part_weights(modifier, heads) for modifier in spec.modifiers}
        self.modifiers = nn.ModuleDict({kind: found for kind, found in modifiers.items() if found is not None})
        self.distribution = part_weights(spec.distribution, heads)
        self.inner: Any = inner
        self.context: ContextParallel | None = None
        self.counts = spec.cross and spec.located
        self.rotated = rotated_size(spec.rotary, heads.key_size) if spec.rotary else 0
        self.use_kernel(None)
        self.reset_parameters()

    def parts(self) -> AttentionParts | None:
        """The spec and projections of a packed layer; None if it is not packed or computes more than these."""
        if self.joint is None or self.inner is not None or not self.only_spec:
            return None
        cos_sin = partial(cos_sin_of_batch, self)
        gains = {} if self.norm is None else self.norm.named()
        joint = self.joint.whole
        return AttentionParts(spec=self.spec, projections=joint, output=self.output, cos_sin=cos_sin, gains=gains)

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name from now on; None chooses the cheapest that supports each call.

        Raises `UnknownName` for a name of no kernel, and `Incompatible` where the layer or its inner module computes
        attention for which the kernel cannot be selected.
        """
        kernels = AttentionKernels(self.spec, name)
        if self.computes_itself:
            require_plain(name, type(self).__name__)
        if self.inner is not None:
            self.inner.use_kernel(name)
        self.kernels = kernels
        # The newest token of a causal sequence attends to all cached keys: no mask is needed.
        last = dataclasses.replace(self.spec, mask=Full()) if self.spec.mask.kind == "causal" else self.spec
        self._last_kernels = AttentionKernels(last, name)
        # A kernel chosen by name also computes the engine's steps.
        self._paged = PagedKernels(self.spec) if name is None and self.inner is None else None
        self.last_needs_positions = last.located or self.inner is not None

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute attention over whole sequences.

        `query` [batch, query, hidden_size]; `source` [batch, key, hidden_size] for cross-attention, else None;
        `key_padding_mask` [batch, key], bool, True where a key is real; `shared_kv`, the keys and values of another
        layer; `lengths`, those of the documents packed end to end in each sequence, which attend only to themselves;
        `shared`, what these have in common, see `forward_documents`. Returns [batch, query, hidden_size].
        """
        if lengths is not None:
            others = {"source": source, "key_padding_mask": key_padding_mask, "shared_kv": shared_kv}
            return forward_documents(self, query, lengths, others, shared)
        out = self.attend(query, with_dropout(self._operands(query, source, key_padding_mask, shared_kv), self))
        return self.project_output(out.flatten(-2))

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        operands = self._operands(query, source, key_padding_mask, shared_kv)
        if self.inner is None:
            return attention_weights(self.spec, operands)
        weights: Tensor = self.inner.weights(query, operands, partial(attention_weights, self.spec))
        return weights

    def intermediates(self, rows: Tensor, source: Tensor | None = None) -> Intermediates | None:
        """The intermediate results for one sequence [tokens, hidden_size]; None if the layer has an inner module."""
        return None if self.inner is not None else intermediates_of(self, rows, source)

    def project_kv(self, query: Tensor) -> Fields:
        """Rotated keys and values [batch, key, num_kv_heads, size] of whole sequences [batch, key, hidden_size]."""
        key, value = self.project_memory(query, self.cos_sin_to(query.shape[-2], query))
        return self.cache_fields(query, key, value)

    def encode(self, source: Tensor) -> Mapping[str, Fields]:
        """The state "source" of one encoder output [source, hidden_size]: its keys and values.

        "key" and "value" are [source, num_kv_heads, head_dim]. If the score projects keys, they are stored projected.
        """
        return {"source": self.cache_fields(source, *self._memory(source))}

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new hidden states [tokens, hidden_size] of all requests.

        Returns [tokens, hidden_size].
        """
        out = attend_ragged(self, query, batch, state)
        return self.output(out.flatten(-2))  # type: ignore[no-any-return]

    def attend(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """Outputs [batch, query, heads, value_size] of operands projected from `rows` [batch, query, hidden_size]."""
        if self.context is not None and self.context.active:
            return self.context.attend(self.spec, operands)
        return self._attend(rows, operands, self.kernels)

    def split_tokens(self, group: dist.ProcessGroup) -> ContextParallel:
        """The `context` that splits the tokens of sequences over a process group, for all layers of a model."""
        return ContextParallel(Striped(group.size()), group)

    def require_token_split(self, tokens: int, ranks: int) -> None:
        """Raise `Incompatible` if the tokens of a sequence cannot be split over ranks, and `InvalidValue` unless their
        number is a multiple of the ranks."""
        if not self.only_spec or self.inner is not None or self.dropout or self.shares_kv:
            raise Incompatible(
                "context parallelism needs a plain attention layer, without dropout and without shares_kv"
            )
        require_context_parallel(self.spec, tokens, ranks)

    def attend_together(self, operands: AttentionInputs) -> Tensor | None:
        """`attend` for several documents packed end to end in one call; None if no kernel supports that."""
        return None if self.own_positions or self.inner is not None else self.kernels.run_together(operands)

    def attend_last(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """Like `attend`, for one query [batch, 1, heads, key_size] per sequence, which attends to all its keys."""
        return self._attend(rows, operands, self._last_kernels)

    def in_place_attention(self, query: Tensor, view: Any) -> InPlaceAttention | None:
        """The cached rows of a view, with a kernel that reads them in place for these queries; None if none does."""
        return None if self._paged is None else self._paged.in_place_attention(query, view)

    def decode_in_place(self, rows: Tensor, query: Tensor, batch: RaggedBatch, view: Any) -> Tensor | None:
        """Outputs [requests, heads, value_size] of a decode step by an inner module that reads chosen rows in place."""
        if self.inner is None or batch_invariant() or not hasattr(view, "in_place"):
            return None
        cached: RowsInPlace | None = view.in_place()
        return None if cached is None else self.inner.decode(rows, query, batch, cached)

    def operands(
        self,
        query: Tensor,
        fields: Fields,
        key_padding_mask: Tensor | None = None,
        positions: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> AttentionInputs:
        """Build attention inputs from queries [batch, query, heads, key_size] and cached fields [batch, key, ...].

        `positions` are those of queries and keys; see `AttentionInputs`.
        """
        return AttentionInputs(
            query=query,
            key=fields["key"] if self.spec.score.reads_keys else fields["value"][..., :0],
            value=fields["value"],
            query_positions=positions[0],
            key_positions=positions[1],
            key_padding_mask=key_padding_mask,
            parameters=self.part_weights(),
            fields={} if self.inner is None else fields,
        )

    def cache_fields(self, rows: Tensor, key: Tensor, value: Tensor, positions: Tensor | None = None) -> Fields:
        """The cache fields of hidden states [..., rows, hidden_size]: values, the keys that the score reads, if any,
        and the inner module's own. `positions` [rows] are counted from 0 unless given."""
        read = {"key": self._scored_key(key)} if self.spec.score.reads_keys else {}
        if self.inner is None:
            return {**read, "value": value}
        if positions is None:
            positions = torch.arange(rows.shape[-2], device=rows.device)
        return {**read, "value": value, **self.inner.remember(rows, positions)}

    def prepared(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionInputs:
        """Build attention inputs from projected and rotated queries [batch, query, heads, key_size], keys and values of
        a model that is not ours: normalised, which is only right for a norm that a rotation does not change."""
        fields = self.cache_fields(key, self._normed(key, "key_gain"), self._normed_value(value))
        return self.operands(self._normed(query, "query_gain"), fields)

    def project_each(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionInputs:
        """Project separate inputs: queries [batch, query_len, hidden_size], keys and values [batch, key_len, ...].

        Queries are aligned with the last keys, except in cross-attention. Raises `InvalidValue` if there is a rotary
        embedding and there are more queries than keys.
        """
        projected, (keys, values) = self.project_query(query), self._memory(key, value)
        cos_sin = self.cos_sin_to(key.shape[-2], key)
        if cos_sin is not None:
            first = key.shape[-2] - query.shape[-2]
            if first < 0:
                raise InvalidValue.of("query", tuple(query.shape), f"at most as many queries as keys, {key.shape[-2]}")
            projected, keys = self._rotated(projected, cos_sin.at(slice(first, None))), self._rotated(keys, cos_sin)
        fields = {"key": self._scored_key(keys), "value": values}
        return self.operands(projected, fields, None, self.positions(query, None))

    def cos_sin_to(self, length: int, like: Tensor) -> CosSin | None:
        """Cosines and sines of positions 0 to `length`, exclusive; None without a rotary embedding."""
        if self.spec.rotary is None:
            return None
        if self.context is not None and self.context.active:
            whole = cos_sin_to(self.spec.rotary, self.rotated, length * self.context.sharding.ranks, like)
            return whole.at(self.context.positions(length).to(like.device))
        return cos_sin_to(self.spec.rotary, self.rotated, length, like)

    def part_weights(self) -> Mapping[str, Tensor]:
        """The learned tensors that kernels take, named as in `AttentionSpec.weights`: all but `KEY_WEIGHT`."""
        modifiers = {f"modifiers.{kind}": part for kind, part in self.modifiers.items()}
        found = named_weights({"score": self.score, **modifiers, "distribution": self.distribution})
        return {name: weight for name, weight in found.items() if name != KEY_WEIGHT}

    def _scored_key(self, key: Tensor) -> Tensor:
        """The keys [..., heads, size] as the score reads them: projected by `KEY_WEIGHT` if it has one."""
        if self.score is None or not self.spec.score.projects_keys:
            return key
        return projected_keys(self.spec.heads, key, cast("Tensor", self.score.key_weight))

    def _attend(self, rows: Tensor, operands: AttentionInputs, kernels: AttentionKernels) -> Tensor:
        if self.inner is None:
            return kernels.run(operands)
        out: Tensor = self.inner(rows, operands, kernels.run)
        return out.reshape(*rows.shape[:-1], self.spec.heads.query, self.spec.heads.value_size)

    def positions(self, query: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Positions of the queries and keys of a source, counted from its first real token; None if the spec uses none.

        `query` is [batch, query_len, ...]. The positions are [1 or batch, query_len], and [batch, key] or None, in
        which padding is not counted. Under a mask, queries are shifted instead, as kernels for windows need keys in
        order.
        """
        if not self.counts:
            return None, None
        places = torch.arange(query.shape[1], device=query.device)[None]
        if key_padding_mask is None:
            return places, None
        if self.spec.mask.kind == "full":
            return places, (key_padding_mask.cumsum(-1) - 1).clamp(min=0)
        return places + (~key_padding_mask).long().cumprod(-1).sum(-1, keepdim=True), None

    def _operands(
        self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None, shared_kv: Fields | None = None
    ) -> AttentionInputs:
        if self.spec.cross != (source is not None):
            allowed = "a tensor [batch, key, hidden_size]" if self.spec.cross else "None for self-attention"
            raise InvalidValue.of("source", "None" if source is None else tuple(source.shape), allowed)
        if source is not None:
            projected = self.project_query(query)
            fields = self.cache_fields(source, *self._memory(source))
        elif shared_kv is None and type(self).project_kv is SpecLayer.project_kv:
            projected, key, value = self.project(query, self.cos_sin_to(query.shape[-2], query))
            fields = self.cache_fields(query, key, value)
        else:
            fields = self.project_kv(query) if shared_kv is None else shared_kv
            projected = self.project_rotated(query, self.cos_sin_to(query.shape[-2], query))
        return self.operands(projected, fields, key_padding_mask, self.positions(query, key_padding_mask))
