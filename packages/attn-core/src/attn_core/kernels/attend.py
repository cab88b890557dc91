"""Attention of queries to keys, over whole sequences and over a paged cache: problems, inputs and kernels."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.batch import RaggedBatch, RowsInPlace
from attn_core.checks import require_whole
from attn_core.dropout import Dropout
from attn_core.errors import InvalidValue
from attn_core.kernels.base import Kernel, Problem
from attn_core.masks.bands import band_of
from attn_core.masks.base import Mask
from attn_core.masks.layout import density
from attn_core.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Varlen:
    """The lengths of documents concatenated in each row: document t has `queries[t]` queries and `keys[t]` keys.

    Attention is computed within each document: positions restart, and queries are aligned to the end of their own keys.
    Raises `InvalidValue` for a negative length, and for different numbers of documents.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.keys):
            given = len(self.queries), len(self.keys)
            raise InvalidValue.of("varlen.queries, keys", given, "equal numbers of entries, one per document")
        for name, lengths in (("queries", self.queries), ("keys", self.keys)):
            for length in lengths:
                require_whole(f"varlen.{name}", length, ge=0)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Varlen:
        """The documents of these lengths in self-attention."""
        return cls(tuple(lengths), tuple(lengths))

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each document."""
        for query, key in zip(pairwise(starts(self.queries)), pairwise(starts(self.keys)), strict=True):
            yield slice(*query), slice(*key)


@dataclass(frozen=True, eq=False)
class VarlenStarts:
    """`Varlen` for a torch.compile graph, which serves documents of any lengths: the starts of the `queries` and `keys`
    of each document and the end of the last one, both int64 [documents + 1], on the CPU (flash-attn's `cu_seqlens`).
    """

    queries: Tensor
    keys: Tensor

    def known(self) -> Varlen:
        """The lengths as Python numbers; raises the errors of `Varlen`."""
        return Varlen(
            *(tuple(stop - start for start, stop in pairwise(ends.tolist())) for ends in (self.queries, self.keys))
        )


def starts(lengths: Sequence[int]) -> list[int]:
    """The start of each document, and the end of the last one."""
    return list(accumulate(lengths, initial=0))


def texts(operands: AttentionInputs) -> Iterator[AttentionInputs]:
    """The inputs of each document by itself; raises `InvalidValue`, see `check_varlen`.

    For dropout, the rows of a batch are numbered on from document to document.
    """
    varlen = known_varlen(operands)
    check_varlen(operands)
    if varlen is None:
        return
    queries, keys = list(varlen.queries), list(varlen.keys)
    # Split once: the gradients of slices are tensors of the whole each.
    query = operands.query.split_with_sizes(queries, 1)
    key, value = (rows.split_with_sizes(keys, 1) for rows in (operands.key, operands.value))
    masks = None if operands.key_padding_mask is None else operands.key_padding_mask.split_with_sizes(keys, 1)
    fields = {name: field.split_with_sizes(keys, 1) for name, field in operands.fields.items()}
    for number in range(len(keys)):
        first = number * operands.query.shape[0]
        yield dataclasses.replace(
            operands,
            query=query[number],
            key=key[number],
            value=value[number],
            key_padding_mask=None if masks is None else masks[number],
            fields={name: parts[number] for name, parts in fields.items()},
            varlen=None,
            dropout=operands.dropout and dataclasses.replace(operands.dropout, first=operands.dropout.first + first),
        )


def known_varlen(operands: AttentionInputs) -> Varlen | None:
    """The lengths of the documents as Python numbers; None where each row is one document."""
    varlen = operands.varlen
    return varlen.known() if isinstance(varlen, VarlenStarts) else varlen


def check_varlen(operands: AttentionInputs) -> None:
    """Raise `InvalidValue` unless the documents are as long as queries and keys, and no positions are given."""
    varlen = known_varlen(operands)
    if varlen is None:
        return
    for name, lengths, rows in (("queries", varlen.queries, operands.query), ("keys", varlen.keys, operands.key)):
        if sum(lengths) != rows.shape[1]:
            raise InvalidValue.of(f"varlen.{name}", sum(lengths), f"a total of {rows.shape[1]}, the number of {name}")
    if operands.query_positions is not None or operands.key_positions is not None:
        raise InvalidValue.of("positions", "given", "None for concatenated documents, where positions restart in each")


TILE = 64
"""The number of queries for which a kernel skips keys together, in the estimate of `AttendProblem.density`."""


@dataclass(frozen=True, kw_only=True)
class SpecProblem(Problem):
    """The properties of an `AttentionSpec` by which kernels of softmax attention accept or refuse it.

    `score`, `modifiers`, `mask` and `distribution` are the kinds of its parts. `irregular_groups` says that key/value
    heads are shared by unequal numbers of query heads, `head_masks` that heads have masks of their own, `length_bound`
    that the mask depends on the number of keys.
    """

    score: str = "scaled_dot"
    modifiers: tuple[str, ...] = ()
    mask: str = "full"
    distribution: str = "softmax"
    key_size: int = 0
    value_size: int = 0
    query_heads: int = 1
    key_value_heads: int = 1
    irregular_groups: bool = False
    head_masks: bool = False
    length_bound: bool = False


def spec_fields(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec's `SpecProblem` by name."""
    return {
        "score": spec.score.kind,
        "modifiers": tuple(modifier.kind for modifier in spec.modifiers),
        "mask": spec.mask.kind,
        "distribution": spec.distribution.kind,
        "key_size": spec.heads.key_size,
        "value_size": spec.heads.value_size,
        "query_heads": spec.heads.query,
        "key_value_heads": spec.heads.key_value,
        "irregular_groups": spec.heads.per_group is None,
        "head_masks": spec.mask.heads is not None,
        "length_bound": spec.mask.by_length,
    }


@dataclass(frozen=True, kw_only=True)
class AttendProblem(SpecProblem):
    """Attention over whole sequences.

    `padded` says that a padding mask or explicit positions are given, `has_positions` that positions are given,
    `kv_unordered` that positions of keys are, which may then be in any order. `varlen` says that rows hold several
    documents, see `Varlen`; where no kernel accepts that, documents are computed one by one. `dropout` says that
    attention weights are dropped at random, `weights` that they are returned.

    For cost estimates, `queries` and `keys` are lengths, 0 where unknown. `density` is the share of all pairs that
    remains for a kernel which skips, for every `TILE` neighbouring queries, the keys that none of them may see. `reach`
    is the number of neighbouring positions that hold all keys of a query, 0 where there is no bound.
    """

    operation: ClassVar[str] = "attend"
    priced: ClassVar[frozenset[str]] = frozenset({"queries", "keys", "density", "reach"})

    padded: bool = False
    has_positions: bool = False
    kv_unordered: bool = False
    varlen: bool = False
    dropout: bool = False
    forward_mode: bool = False
    weights: bool = False
    gradients: bool = False
    queries: int = 0
    keys: int = 0
    density: float = 1.0
    reach: int = 0

    def measured_as(self) -> dict[str, Any] | None:
        """The call as it is measured: softmax attention with only a mask, for as many queries as keys or one query."""
        named = (*MEASURED, *self.priced)
        defaults = type(self).defaults()
        other = any(getattr(self, name) != default for name, default in defaults.items() if name not in named)
        if other or not self.keys or self.queries not in {1, self.keys} or self.key_size != self.value_size:
            return None
        found = {name: getattr(self, name) for name in ("dtype", "mask", "gradients", "queries", "keys", "density")}
        return {"operation": self.operation, "head_dim": self.key_size, **found}


MEASURED = ("dtype", "device", "mask", "key_size", "value_size", "query_heads", "key_value_heads", "gradients")
"""Fields in which measured calls differ, and the numbers of heads, which hardly affect relative times."""


def attend_problem(
    spec: AttentionSpec, *, dtype: str, device: str, gradients: bool, padded: bool, **known: bool | int
) -> AttendProblem:
    """The problem of computing `spec` over given tensors.

    `padded` says that a key padding mask or explicit positions are given. `known` are the optional fields
    `has_positions`, `kv_unordered`, `varlen`, `dropout`, `forward_mode`, `weights`, `queries` and `keys` of
    `AttendProblem`.
    """
    queries, keys = int(known.get("queries", 0)), int(known.get("keys", 0))
    return AttendProblem(
        **spec_fields(spec),
        padded=padded,
        has_positions=bool(known.get("has_positions")),
        kv_unordered=bool(known.get("kv_unordered")),
        varlen=bool(known.get("varlen")),
        dropout=bool(known.get("dropout")),
        forward_mode=bool(known.get("forward_mode")),
        weights=bool(known.get("weights")),
        gradients=gradients,
        dtype=dtype,
        device=device,
        queries=queries,
        keys=keys,
        density=density(spec.mask, queries, keys, TILE) if queries and keys else 1.0,
        reach=reach_of(spec.mask),
    )


def reach_of(mask: Mask) -> int:
    """The number of neighbouring positions that hold all keys that a query can see; 0 where there is no bound."""
    if mask.lookback is None or mask.lookahead is None:
        return 0
    return mask.lookback + mask.lookahead + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """The tensors of one `attend` call.

    `query` [batch, query, heads, key_size]; `key` [batch, key, key_value_heads, key_size]; `value`
    [batch, key, key_value_heads, value_size]. `query_positions` and `key_positions` [batch or 1, length], int64,
    absolute, are None where queries are simply aligned to the end of the keys. Query positions are consecutive, from
    any first position; key positions, where they are given, may be any. `key_padding_mask` [batch, key], bool, True
    where a key is real, is None where every key is. `parameters` are the learned weights by name; see
    `AttentionSpec.weights`. `fields` [batch, key, ...] are what an `InnerAttention` caches besides keys and values.
    `varlen` are the documents that are concatenated in every row; None where a row is one document. `dropout`
    determines which weights become zero; None where none does.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    key_padding_mask: Tensor | None = None
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    varlen: Varlen | VarlenStarts | None = None
    dropout: Dropout | None = None


class AttendKernel(Kernel[AttendProblem]):
    """Computes attention over whole sequences."""

    problem: ClassVar[type[Problem]] = AttendProblem

    @abstractmethod
    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]."""

    def run_in_graph(self, spec: AttentionSpec, name: str, operands: AttentionInputs) -> Tensor:
        """Like `run`, but called while torch.compile traces.

        `name` is the name of the spec from `named_spec`, "" if it has none.
        """
        return self.run(spec, operands)


SPECS: dict[str, AttentionSpec] = {}
"""The specs that compiled graphs of this process refer to, by name."""


def named_spec(spec: AttentionSpec) -> str:
    """Add the spec to `SPECS` by a name that is the same in every process, which is returned; "" for a spec that holds
    functions or tensors, which is not added."""
    text = repr(spec)
    if " at 0x" in text or "tensor(" in text:
        return ""
    name = hashlib.sha256(text.encode()).hexdigest()
    SPECS[name] = spec
    return name


BAND = "band"
"""`mask` of a paged problem in which a query sees itself and all earlier keys, or a fixed number of the latest ones."""
LATENT = "latent"
"""`rows` of a paged problem of latent attention: see `PagedAttentionInputs`."""


@dataclass(frozen=True, kw_only=True)
class PagedAttendProblem(SpecProblem):
    """Attention of new tokens to cached rows in the cache's memory; fields as in `SpecProblem`.

    `mask` is `BAND` for every causal band. `rows` is the form of the cached rows: `RowsInPlace.form`, or `LATENT`.
    """

    operation: ClassVar[str] = "attend_paged"

    rows: str = "plain"


def paged_problem(spec: AttentionSpec, *, dtype: str, device: str, rows: str = "plain") -> PagedAttendProblem:
    """The problem of attending to cached rows in place; `rows` is `RowsInPlace.form`, or `LATENT`."""
    fields, band = spec_fields(spec), band_of(spec.mask)
    if band is not None and band.right == 0:
        fields["mask"] = BAND
    return PagedAttendProblem(**fields, rows=rows, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedAttentionInputs:
    """The tensors of one call of a `PagedAttendKernel`.

    `query` [tokens, heads, key_size] are the queries of all tokens of the batch, in its order; outputs are only needed
    for `requests`, others are undefined. `rows` are the cached rows, this step's included, with the fields "key" [rows,
    key_value_heads, key_size] and "value"; or in latent attention "latent" [rows, value_size], which is both the value
    and the first part of the key, and "rotary_key" [rows, rest], the other part. `parameters` as in `AttentionInputs`.
    """

    query: Tensor
    batch: RaggedBatch
    rows: RowsInPlace
    requests: tuple[int, ...]
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


class PagedAttendKernel(Kernel[PagedAttendProblem]):
    """Computes attention to cached rows in the cache's memory.

    Where no kernel accepts, rows are gathered and an `AttendKernel` computes the same. `graph_queries` is the largest
    number of tokens of a request in `StaticRows` that the kernel supports, None for any: its work on the host then
    depends only on the numbers of tokens and requests. It is 0 if the kernel plans each step on the host.
    """

    problem: ClassVar[type[Problem]] = PagedAttendProblem
    graph_queries: ClassVar[int | None] = 0

    def records(self, max_query_len: int) -> bool:
        """Whether steps with up to `max_query_len` tokens of a request can be recorded as graphs."""
        return self.graph_queries is None or max_query_len <= self.graph_queries

    @abstractmethod
    def run(self, spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
        """The output [tokens, heads, value_size]."""
