"""The projections of the layer of a spec, and the initial values of what it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from attn_core import AttentionSpec, Heads
from attn_core.errors import InvalidValue, WrongState
from attn_core.heads import Part
from attn_core.joint import Joins, joint_outputs
from attn_core.kernels.linear import Pack
from attn_core.modifiers import ScoreFunction
from attn_core.norms import QkL2Norm, QkvNorm
from attn_core.scores import Additive, Concat
from torch import Tensor, nn

from attn_variants.compute.norm import normed
from attn_variants.compute.rotary import CosSin, rotate, rotate_appended
from attn_variants.scores import init_additive, init_concat


class PartWeights(nn.Module):
    """The learned weights of one part, by name."""

    no_weight_decay: ClassVar[tuple[str, ...]] = ("bias",)
    """Parameters of vectors, which are stored in two dimensions."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            if hasattr(self, name):
                raise InvalidValue.of("parameters", name, "names that are not attributes of torch.nn.Module")
            self.register_parameter(name, nn.Parameter(tensor))

    def named(self) -> dict[str, Tensor]:
        """The weights by name."""
        return {name: getattr(self, name) for name in self.names}


def part_weights(part: Part | None, heads: Heads, *, without: str | None = None) -> PartWeights | None:
    """The learned weights of a part, initialised, except the one called `without`; None if it has none."""
    if part is None or not part.weights(heads):
        return None
    return PartWeights({name: weight for name, weight in init_weights(part, heads).items() if name != without})


def named_weights(parts: Mapping[str, nn.Module | None]) -> dict[str, Tensor]:
    """The weights of parts, named "part.weight", such as "score.bias"."""
    found = [(place, cast("PartWeights", part)) for place, part in parts.items() if part is not None]
    return {f"{place}.{name}": weight for place, part in found for name, weight in part.named().items()}


def init_weights(part: Part, heads: Heads) -> dict[str, Tensor]:
    """The initial weights of a part, by name."""
    if isinstance(part, Additive):
        return init_additive(part, heads)
    if isinstance(part, Concat):
        return init_concat(part, heads)
    if isinstance(part, QkL2Norm):
        return {"query_gain": torch.full((1,), math.log2(part.length**2 - part.length))}
    if isinstance(part, ScoreFunction):
        return {name: beginning(part, name, shape) for name, shape in part.weights(heads).items()}
    rule = INITIALIZERS.get(part.kind, normal)
    return {name: rule(shape, heads) for name, shape in part.weights(heads).items()}


def beginning(part: ScoreFunction, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial values of one parameter of a score function: from its `initial`, else drawn from N(0, 0.02²)."""
    bounds = part.initial.get(name)
    if bounds is None:
        return torch.randn(shape) * 0.02
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    return torch.rand(shape) * (high - low) + low if low != high else torch.full(shape, float(low))


def normal(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Draw from N(0, 0.02²)."""
    return torch.randn(shape) * 0.02


def uniform(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Draw uniformly from ±0.1, as in the code of Luong et al. 2015."""
    return (torch.rand(shape) * 2 - 1) * 0.1


def zeros(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Zeros."""
    return torch.zeros(shape)


def ones(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Ones."""
    return torch.ones(shape)


def cosine_sharpness(shape: tuple[int, ...], heads: Heads) -> Tensor:
    """The b with softplus(b) = √d_k, so that scores have the variance of scaled dot products of random vectors."""
    beta = heads.key_size**0.5
    return torch.full(shape, beta + math.log1p(-math.exp(-beta)))


def glorot(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Draw Glorot-uniform values, with fan-in and fan-out from the last two axes."""
    limit = math.sqrt(6 / (shape[-1] + shape[-2]))
    return (torch.rand(shape) * 2 - 1) * limit


INITIALIZERS: Mapping[str, Callable[[tuple[int, ...], Heads], Tensor]] = {
    "general": uniform,
    "location": uniform,
    "local_gaussian": uniform,
    "cosine": cosine_sharpness,
    "sink": zeros,
    "adaptive_entmax": zeros,
    "relative_keys": glorot,
    "relative_values": glorot,
    "dependency_keys": glorot,
    "dependency_values": glorot,
    "qk_norm": ones,
    "qk_norm_all_heads": ones,
    "qkv_norm": ones,
}
"""The initialiser of each kind of part; `normal` for kinds that are not listed."""


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """Reshape rows [..., heads · size] to [..., heads, size]."""
    return rows.reshape(*rows.shape[:-1], heads, rows.shape[-1] // heads)


def fresh_linear(into: int, out: int, *, bias: bool) -> nn.Linear:
    """A linear layer with Glorot-uniform weights and zero biases."""
    linear = nn.Linear(into, out, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def multiplied_in(rows: Tensor) -> torch.dtype:
    """The dtype in which linear layers multiply rows: that of autocast if enabled, else the rows' own."""
    kind = rows.device.type
    # The meta device has no autocast, and torch raises when asked for it.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else rows.dtype


def glorot_parameter(*shape: int) -> nn.Parameter:
    """Weights [heads, into, out], Glorot-uniform for each head, or vectors [heads, size], uniform in ±1/√size."""
    bound = (6 / (shape[-2] + shape[-1])) ** 0.5 if len(shape) > 2 else shape[-1] ** -0.5
    return nn.Parameter((torch.rand(shape) * 2 - 1) * bound)


def refuse_source(source: Tensor | None) -> None:
    """Raise `InvalidValue` if a source is given to a self-attention layer."""
    if source is not None:
        raise InvalidValue.of("source", tuple(source.shape), "None for self-attention")


QUERY_KEY_VALUE = ("query", "key", "value")
"""The names of the projections that most mechanisms apply to one input."""


class JointProjection(nn.Module):
    """Several linear layers of one input, packed into one: `whole` concatenates their outputs, of these `sizes`.

    `names` are those of the layers.
    """

    def __init__(self, whole: nn.Module, sizes: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        self.whole = whole
        self.sizes = list(sizes)
        self.names = tuple(names)

    @classmethod
    def of(cls, pack: Pack, layers: Sequence[nn.Linear], names: Sequence[str] = QUERY_KEY_VALUE) -> JointProjection:
        """Pack layers of one input into one."""
        return cls(pack(layers), [layer.out_features for layer in layers], names)

    def forward(self, rows: Tensor) -> list[Tensor]:
        """The outputs [..., size] of each layer."""
        return list(self.whole(rows).split(self.sizes, dim=-1))

    def parts(self) -> list[JointPart]:
        """A module for each layer, to call one of them alone."""
        return [JointPart(self, index) for index in range(len(self.sizes))]


class JointPart(nn.Module):
    """One of the layers of a joint projection."""

    def __init__(self, joint: JointProjection, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs [..., size] of this layer; the other layers are computed too and dropped."""
        parts: list[Tensor] = self.joint(rows)
        return parts[self.index]


class Projections(nn.Module):
    """The projections of queries, keys and values of a spec over inputs of `hidden_size`, and that of the output.

    `query`, `key`, `value` and `output` are `nn.Linear`, with Glorot-uniform weights and zero biases. With `shares_kv`
    there are no `key` and `value`; without keys in its score a spec has no `key`. `projected` gives the head sizes of
    the projections if they differ from those of the attention. `norm` are the gains of queries and keys, if any; a
    `QkvNorm` normalises values, too.
    """

    def __init__(
        self, spec: AttentionSpec, *, hidden_size: int, bias: bool, shares_kv: bool, projected: Heads | None
    ) -> None:
        super().__init__()
        heads, own = spec.heads, projected or spec.heads
        self.spec = spec
        self.shares_kv = shares_kv
        self.query: nn.Module = nn.Linear(hidden_size, heads.query * own.key_size, bias=bias)
        self.key: nn.Module | None = None
        self.value: nn.Module | None = None
        if not shares_kv and spec.score.reads_keys:
            self.key = nn.Linear(hidden_size, heads.key_value * own.key_size, bias=bias)
        if not shares_kv:
            self.value = nn.Linear(hidden_size, heads.key_value * own.value_size, bias=bias)
        self.output: nn.Module = nn.Linear(heads.query * heads.value_size, hidden_size, bias=bias)
        self.norm = part_weights(spec.norm, heads, without="key_gain" if shares_kv else None)
        self.joint: JointProjection | None = None
        self.joins: Joins | None = None

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
            packed = [pack([part]) for part in memory]
            self.query, self.value = pack([query]), packed[-1]
            self.key = packed[0] if self.key is not None else None
            return
        self.joint = JointProjection.of(pack, [query, *memory])
        self.query, self.key, self.value = self.joint.parts()

    def joint_layers(self) -> list[nn.Linear]:
        """The query, key and value layers if all three are `nn.Linear` and project the same input, else []."""
        if self.spec.cross or self.shares_kv:
            return []
        found = [module for module in (self.query, self.key, self.value) if isinstance(module, nn.Linear)]
        return found if len(found) == len(QUERY_KEY_VALUE) else []

    def project(self, rows: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [..., heads, size] of rows [..., tokens, hidden_size]."""
        query, key, value = self._projected(rows)
        return self._rotated(query, cos_sin), self._rotated(key, cos_sin), value

    def project_output(self, rows: Tensor) -> Tensor:
        """The output [..., hidden_size] of the layer for what is attended, rows [..., heads * value_size]."""
        return joint_outputs(rows, [self.output], self.joins)[0]

    def project_query(self, rows: Tensor) -> Tensor:
        """Queries [..., heads, key_size] of rows [..., hidden_size], normalised if the spec has a norm, not rotated."""
        heads = self.spec.heads
        query = by_heads(self.query(rows), heads.query)
        return self._normed(query, "query_gain")

    def project_rotated(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Queries [..., tokens, heads, size] of rows [..., tokens, hidden_size], rotated to their positions."""
        return self._rotated(self.project_query(rows), cos_sin)

    def project_memory(self, rows: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [..., tokens, heads, size] of rows [..., tokens, hidden_size]."""
        key, value = self._memory(rows)
        return self._rotated(key, cos_sin), value

    def project_appended(self, rows: Tensor, cos_sin: CosSin | None, view: Any) -> Tensor | None:
        """Project, rotate and write keys and values into the cache of a view in one kernel call; None if none can.

        Returns the rotated queries [tokens, heads, key_size] of rows [tokens, hidden_size]."""
        rotary, kept = self.spec.rotary, view.in_place() if hasattr(view, "in_place") else None
        if rotary is None or cos_sin is None or kept is None or kept.form != "plain":
            return None
        if kept.fields.keys() != {"key", "value"}:
            return None
        query, key, value = self._projected(rows)
        return rotate_appended((query, key, value), cos_sin, kept, interleaved=rotary.interleaved)

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [..., heads, size], normalised if the spec has a norm, not rotated."""
        layers = self.joint_layers() if self.joint is None else []
        if self.joint is None and not layers:
            return self.project_query(rows), *self._memory(rows)
        heads = self.spec.heads
        query, key, value = joint_outputs(rows, layers, self.joins) if self.joint is None else self.joint(rows)
        query = self._normed(by_heads(query, heads.query), "query_gain")
        key = self._normed(by_heads(key, heads.key_value), "key_gain")
        return query, key, self._normed_value(by_heads(value, heads.key_value))

    def _projections(self) -> list[nn.Linear]:
        own = (self.query, self.key, self.value, self.output)
        return [cast("nn.Linear", module) for module in own if not isinstance(module, nn.Identity | None)]

    def _memory(self, rows: Tensor, value_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        heads = self.spec.heads
        if self.value is None:
            raise WrongState(
                "a layer with shares_kv has no key and value projections: pass those of another layer as shared_kv"
            )
        value = by_heads(self.value(rows if value_rows is None else value_rows), heads.key_value)
        value = self._normed_value(value)
        if self.key is None:
            return value[..., :0], value
        return self._normed(by_heads(self.key(rows), heads.key_value), "key_gain"), value

    def _normed(self, rows: Tensor, gain: str) -> Tensor:
        if self.norm is None or self.spec.norm is None:
            return rows
        return normed(rows, self.norm.named().get(gain), self.spec.norm)

    def _normed_value(self, rows: Tensor) -> Tensor:
        return normed(rows, None, self.spec.norm) if isinstance(self.spec.norm, QkvNorm) else rows

    def _rotated(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        if cos_sin is None or self.spec.rotary is None or not rows.shape[-1]:
            return rows
        return rotate(rows, cos_sin, interleaved=self.spec.rotary.interleaved)
