"""The layer that computes any `AttentionSpec`: projections, rotary embedding, attention kernel, output projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from attn_core import AttentionInputs, AttentionSpec, Fields, Full, Heads, InnerAttention, LayerState, RaggedBatch
from attn_core.checks import require_no_module
from attn_core.errors import Incompatible, InvalidValue, WrongState
from attn_core.joint import Joins, joint_outputs
from attn_core.kernels.attend import Varlen, VarlenStarts
from attn_core.kernels.block import AttentionParts
from attn_core.kernels.linear import Pack
from torch import Tensor, nn

from attn_variants.compute.norm import normed
from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import CosSin, cos_sin_to, rotate, rotate_appended, rotated_size
from attn_variants.context_parallel import ContextParallel, Striped, require_context_parallel
from attn_variants.initialization import named_weights, part_weights
from attn_variants.layer_utils import (
    QUERY_KEY_VALUE,
    JointProjection,
    by_heads,
    document_positions,
    fresh_linear,
    with_dropout,
)
from attn_variants.paged_plan import PagedPlan, Reached
from attn_variants.plan import KernelPlan
from attn_variants.scores import projected_keys
from attn_variants.stepping import attend_ragged, cos_sin_of_batch

KEY_WEIGHT = "score.key_weight"
"""The name of the weight by which additive and concat scores project keys; applied by the layer, not by the kernel."""


class SpecLayer(nn.Module):
    """An attention layer that computes a spec over inputs of `hidden_size`.

    Learned parameters: `query`, `key`, `value`, `output` (`nn.Linear`, Glorot-uniform weights, zero biases) and, if the
    parts of the spec have weights of their own, `score`, `modifiers` by kind, `distribution` and `norm`. The module
    `inner`, if given, computes attention between the projections and the output. With `shares_kv` the layer attends to
    the keys and values of another layer and has no `key` and `value`; without keys in its score it has no `key`.
    `projected` gives the head sizes of the projections if they differ from those of the attention. `context`, if set
    and active, splits the tokens of a sequence over ranks (context parallelism). `dropout` is the probability with
    which attention weights are set to zero when training on whole sequences. `counts` says that it attends to a source
    and needs positions, which are counted from the first real token of each.
    """

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
        super().__init__()
        for place, part in spec.parts.items():
            require_no_module(place, part)
        heads = spec.heads
        own = projected or heads
        self.spec = spec
        self.shares_kv = shares_kv
        self.dropout = dropout
        self.query: nn.Module = nn.Linear(hidden_size, heads.query * own.key_size, bias=bias)
        self.key: nn.Module | None = None
        self.value: nn.Module | None = None
        if not shares_kv and spec.score.reads_keys:
            self.key = nn.Linear(hidden_size, heads.key_value * own.key_size, bias=bias)
        if not shares_kv:
            self.value = nn.Linear(hidden_size, heads.key_value * own.value_size, bias=bias)
        self.output: nn.Module = nn.Linear(heads.query * heads.value_size, hidden_size, bias=bias)
        self.score = part_weights(spec.score, heads, without="key_weight" if shares_kv else None)
        modifiers = {modifier.kind: part_weights(modifier, heads) for modifier in spec.modifiers}
        self.modifiers = nn.ModuleDict({kind: found for kind, found in modifiers.items() if found is not None})
        self.distribution = part_weights(spec.distribution, heads)
        self.norm = part_weights(spec.norm, heads, without="key_gain" if shares_kv else None)
        self.inner: Any = inner
        self.joint: JointProjection | None = None
        self.joins: Joins | None = None
        self.context: ContextParallel | None = None
        self.counts = spec.cross and spec.located
        self.rotated = rotated_size(spec.rotary, heads.key_size) if spec.rotary else 0
        self.use_kernel(None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections."""
        for linear in self._projections():
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def replace_output(self, *, bias: bool) -> None:
        """Replace the output projection by a newly initialised one, with or without a bias."""
        old = cast("nn.Linear", self.output)
        self.output = fresh_linear(old.in_features, old.out_features, bias=bias)

    def leave_out_projections(self) -> None:
        """Replace all projections by identities: queries, keys and values are the inputs, one head of their width."""
        self.query, self.output = nn.Identity(), nn.Identity()
        self.key = None if self.key is None else nn.Identity()
        self.value = nn.Identity()

    def pack(self, pack: Pack) -> None:
        """Pack the projections for serving; query, key and value of one input become a single joint projection."""
        if not self._projections():
            return
        query, *memory, output = self._projections()
        self.output = pack([output])
        if self.shares_kv:
            self.query = pack([query])
            return
        if not self.joint_layers():
            varlen = [pack([part]) for part in memory]
            self.query, self.value = pack([query]), varlen[-1]
            self.key = varlen[0] if self.key is not None else None
            return
        self.joint = JointProjection.of(pack, [query, *memory])
        self.query, self.key, self.value = self.joint.parts()

    def joint_layers(self) -> list[nn.Linear]:
        """The query, key and value layers if all three are `nn.Linear` and project the same input, else []."""
        if self.spec.cross or self.shares_kv:
            return []
        found = [module for module in (self.query, self.key, self.value) if isinstance(module, nn.Linear)]
        return found if len(found) == len(QUERY_KEY_VALUE) else []

    def parts(self) -> AttentionParts | None:
        """The spec and projections of a packed layer; None if it is not packed or computes more than these."""
        if self.joint is None or self.inner is not None or type(self) is not SpecLayer:
            return None
        cos_sin = partial(cos_sin_of_batch, self)
        return AttentionParts(spec=self.spec, projections=self.joint.whole, output=self.output, cos_sin=cos_sin)

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name from now on; None chooses the cheapest that supports each call.

        Raises `UnknownName` for a name of no kernel, and `Incompatible` where the inner module computes attention for
        which the kernel cannot be selected.
        """
        plan = KernelPlan(self.spec, name)
        if self.inner is not None:
            self.inner.use_kernel(name)
        self._plan = plan
        # The newest token of a causal sequence attends to all cached keys: no mask is needed.
        last = dataclasses.replace(self.spec, mask=Full()) if self.spec.mask.kind == "causal" else self.spec
        self._last_plan = KernelPlan(last, name)
        # A kernel chosen by name also computes the engine's steps.
        self._paged = PagedPlan(self.spec) if name is None and self.inner is None else None
        self.last_needs_positions = last.located or self.inner is not None

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Compute attention over whole sequences.

        `query` [batch, query, hidden_size]; `source` [batch, key, hidden_size] for cross-attention, else None;
        `key_padding_mask` [batch, key], bool, True where a key is real; `shared_kv`, the keys and values of another
        layer; `lengths`, those of the documents packed end to end in each sequence, which attend only to themselves.
        Returns [batch, query, hidden_size].
        """
        if lengths is not None:
            others = {"source": source, "key_padding_mask": key_padding_mask, "shared_kv": shared_kv}
            return self._forward_documents(query, lengths, others)
        out = self.attend(query, with_dropout(self._operands(query, source, key_padding_mask, shared_kv), self))
        return self.output(out.flatten(-2))  # type: ignore[no-any-return]

    def _forward_documents(
        self, rows: Tensor, lengths: Sequence[int] | Tensor, others: Mapping[str, object | None]
    ) -> Tensor:
        """Self-attention within each of the documents packed end to end in `rows` [batch, sum of lengths, hidden_size].

        Positions restart at 0 in every document. Layers that compute more than their spec run one document at a time.
        With lengths as an int64 tensor [documents] on the CPU, one compiled graph serves documents of any lengths.
        Raises `InvalidValue` if the lengths do not sum to the number of rows, if the layer is a cross-attention, or if
        one of `others`, the further arguments of `forward` by name, is given.
        """
        given = sorted(name for name, value in others.items() if value is not None)
        if given or self.spec.cross:
            allowed = "self-attention without further arguments"
            raise InvalidValue.of("lengths", f"lengths together with {', '.join(given) or 'a source'}", allowed)
        more = type(self) is not SpecLayer or self.inner is not None or self.shares_kv
        if torch.compiler.is_compiling() and isinstance(lengths, Tensor) and not more:
            return self._attend_documents(rows, *documents_in_graph(rows, lengths))
        varlen = Varlen.of(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
        if sum(varlen.keys) != rows.shape[-2]:
            raise InvalidValue.of(
                "lengths", sum(varlen.keys), f"lengths that sum to the number of tokens, {rows.shape[-2]}"
            )
        if more:
            outs = (self(rows[..., document, :]) for document, _ in varlen.spans())
            return torch.cat([rows[..., :0, :], *outs], dim=-2)
        return self._attend_documents(rows, varlen, document_positions(varlen.keys, rows.device))

    def _attend_documents(self, rows: Tensor, varlen: Varlen | VarlenStarts, positions: Tensor) -> Tensor:
        """`_forward_documents` for checked lengths; `positions` [rows] are those of the rows in their documents."""
        cos_sin = None
        if self.spec.rotary is not None:
            longest = rows.shape[-2] if isinstance(varlen, VarlenStarts) else max(varlen.keys, default=1)
            cos_sin = cos_sin_to(self.spec.rotary, self.rotated, longest, rows).at(positions.to(rows.device))
        query, key, value = self.project(rows, cos_sin)
        inputs = dataclasses.replace(self.operands(query, self.remembered(rows, key, value)), varlen=varlen)
        return self.output(self.attend(rows, with_dropout(inputs, self)).flatten(-2))  # type: ignore[no-any-return]

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

    def project_kv(self, query: Tensor) -> Fields:
        """Rotated keys and values [batch, key, num_kv_heads, size] of whole sequences [batch, key, hidden_size]."""
        key, value = self.project_memory(query, self.cos_sin_to(query.shape[-2], query))
        return self.remembered(query, key, value)

    def encode(self, source: Tensor) -> Mapping[str, Fields]:
        """The state "source" of one encoder output [source, hidden_size]: its keys and values.

        "key" and "value" are [source, num_kv_heads, head_dim]. If the score projects keys, they are stored projected.
        """
        return {"source": self.remembered(source, *self._memory(source))}

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
        return self._attend(rows, operands, self._plan)

    def split_tokens(self, group: dist.ProcessGroup) -> ContextParallel:
        """The `context` that splits the tokens of sequences over a process group, for all layers of a model."""
        return ContextParallel(Striped(group.size()), group)

    def require_token_split(self, tokens: int, ranks: int) -> None:
        """Raise `Incompatible` if the tokens of a sequence cannot be split over ranks, and `InvalidValue` unless their
        number is a multiple of the ranks."""
        if type(self) is not SpecLayer or self.inner is not None or self.dropout or self.shares_kv:
            raise Incompatible(
                "context parallelism needs a plain attention layer, without dropout and without shares_kv"
            )
        require_context_parallel(self.spec, tokens, ranks)

    def attend_together(self, operands: AttentionInputs) -> Tensor | None:
        """`attend` for several documents packed end to end in one call; None if no kernel supports that."""
        kind = type(self)
        # A layer that overrides these sets positions of its own, which would count from the first document's first row.
        own = kind._attend is not SpecLayer._attend or kind.operands is not SpecLayer.operands  # noqa: SLF001
        return None if own or self.inner is not None else self._plan.run_together(operands)

    def attend_last(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """Like `attend`, for one query [batch, 1, heads, key_size] per sequence, which attends to all its keys."""
        return self._attend(rows, operands, self._last_plan)

    def reach(self, query: Tensor, view: Any) -> Reached | None:
        """The cached rows of a view, with a kernel that reads them in place for these queries; None if none does."""
        return None if self._paged is None else self._paged.reach(query, view)

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

    def remembered(self, rows: Tensor, key: Tensor, value: Tensor) -> Fields:
        """The cache fields of hidden states [..., hidden_size]: values, and the keys that the score reads, if any."""
        read = {"key": self._scored_key(key)} if self.spec.score.reads_keys else {}
        return {**read, "value": value, **self.inner_fields(rows)}

    def inner_fields(self, rows: Tensor) -> Fields:
        """The inner module's own cache fields for hidden states [..., hidden_size]."""
        remembered: Fields = {} if self.inner is None else self.inner.remember(rows)
        return remembered

    def project_query(self, rows: Tensor) -> Tensor:
        """Queries [..., heads, key_size] of rows [..., hidden_size], normalised if the spec has a norm, not rotated."""
        heads = self.spec.heads
        query = by_heads(self.query(rows), heads.query)
        return self._normed(query, "query_gain")

    def project(self, rows: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [..., heads, size] of rows [..., tokens, hidden_size]."""
        if self.joint is None and not self.joint_layers():
            return self.project_rotated(rows, cos_sin), *self.project_memory(rows, cos_sin)
        query, key, value = self._projected(rows)
        return self._turned(query, cos_sin), self._turned(key, cos_sin), value

    def project_appended(self, rows: Tensor, cos_sin: CosSin | None, view: Any) -> Tensor | None:
        """Project, rotate and write keys and values into the cache of a view in one kernel call; None if none can.

        Returns the rotated queries [tokens, heads, key_size] of rows [tokens, hidden_size]."""
        rotary, kept = self.spec.rotary, view.in_place() if hasattr(view, "in_place") else None
        if rotary is None or cos_sin is None or kept is None or kept.form != "plain":
            return None
        if self.inner is not None or kept.fields.keys() != {"key", "value"}:
            return None
        query, key, value = self._projected(rows)
        return rotate_appended((query, key, value), cos_sin, kept, interleaved=rotary.interleaved)

    def project_rotated(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Queries [..., tokens, heads, size] of rows [..., tokens, hidden_size], rotated to their positions."""
        return self._turned(self.project_query(rows), cos_sin)

    def project_memory(self, rows: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [..., tokens, heads, size] of rows [..., tokens, hidden_size]."""
        key, value = self._memory(rows)
        return self._turned(key, cos_sin), value

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
            projected, keys = self._turned(projected, cos_sin.at(slice(first, None))), self._turned(keys, cos_sin)
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

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, size], normalised if the spec has a norm, not rotated."""
        layers = self.joint_layers() if self.joint is None else []
        if self.joint is None and not layers:
            return self.project_query(rows), *self._memory(rows)
        heads = self.spec.heads
        query, key, value = joint_outputs(rows, layers, self.joins) if self.joint is None else self.joint(rows)
        query = self._normed(by_heads(query, heads.query), "query_gain")
        return query, self._normed(by_heads(key, heads.key_value), "key_gain"), by_heads(value, heads.key_value)

    def _normed(self, rows: Tensor, gain: str) -> Tensor:
        if self.norm is None or self.spec.norm is None:
            return rows
        return normed(rows, self.norm.named().get(gain), self.spec.norm)

    def _turned(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        if cos_sin is None or self.spec.rotary is None or not rows.shape[-1]:
            return rows
        return rotate(rows, cos_sin, interleaved=self.spec.rotary.interleaved)

    def _attend(self, rows: Tensor, operands: AttentionInputs, plan: KernelPlan) -> Tensor:
        if self.inner is None:
            return plan.run(operands)
        out: Tensor = self.inner(rows, operands, plan.run)
        return out.reshape(*rows.shape[:-1], self.spec.heads.query, self.spec.heads.value_size)

    def _projections(self) -> list[nn.Linear]:
        own = (self.query, self.key, self.value, self.output)
        return [cast("nn.Linear", module) for module in own if not isinstance(module, nn.Identity | None)]

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

    def _memory(self, rows: Tensor, value_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        heads = self.spec.heads
        if self.value is None:
            raise WrongState(
                "a layer with shares_kv has no key and value projections: pass those of another layer as shared_kv"
            )
        value = by_heads(self.value(rows if value_rows is None else value_rows), heads.key_value)
        if self.key is None:
            return value[..., :0], value
        return self._normed(by_heads(self.key(rows), heads.key_value), "key_gain"), value

    def _operands(
        self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None, shared_kv: Fields | None = None
    ) -> AttentionInputs:
        if self.spec.cross != (source is not None):
            allowed = "a tensor [batch, key, hidden_size]" if self.spec.cross else "None for self-attention"
            raise InvalidValue.of("source", "None" if source is None else tuple(source.shape), allowed)
        if source is not None:
            projected = self.project_query(query)
            fields = self.remembered(source, *self._memory(source))
        elif shared_kv is None and type(self).project_kv is SpecLayer.project_kv:
            projected, key, value = self.project(query, self.cos_sin_to(query.shape[-2], query))
            fields = self.remembered(query, key, value)
        else:
            fields = self.project_kv(query) if shared_kv is None else shared_kv
            projected = self.project_rotated(query, self.cos_sin_to(query.shape[-2], query))
        return self.operands(projected, fields, key_padding_mask, self.positions(query, key_padding_mask))


def documents_in_graph(rows: Tensor, lengths: Tensor) -> tuple[VarlenStarts, Tensor]:
    """The document starts and row positions, which restart at 0 in each document, computed inside a compiled graph.

    `lengths` [documents] is an int64 tensor on the CPU.
    """
    ends = lengths.cumsum(0)
    first = torch.repeat_interleave(ends - lengths, lengths, output_size=rows.shape[-2])
    starts = torch.nn.functional.pad(ends, (1, 0))
    return VarlenStarts(starts, starts), torch.arange(rows.shape[-2], device=first.device) - first
