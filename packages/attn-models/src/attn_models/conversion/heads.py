"""Convert a decoder to fewer key/value heads (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from attn_core import AttentionSpec, Capability, Heads, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_core.norms import QkNormAllHeads
from attn_schema.decoder import AttentionChoice, DecoderConfig
from torch import Tensor

from attn_models.attention import layer_attentions
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import STANDARD

PROJECTIONS = ("key.weight", "key.bias", "value.weight", "value.bias")


def specs_of(config: DecoderConfig) -> list[AttentionSpec]:
    """The spec of every layer.

    Raises `Incompatible` for attention without keys and values per head, or with a norm over all heads together.
    """
    specs = []
    for attention in layer_attentions(config):
        spec = attention.mechanism.spec(attention.config)
        if spec is None:
            name = attention.mechanism.name
            raise Incompatible(f"mechanism {name!r} has no heads of keys and values to convert", mechanism=name)
        if isinstance(spec.norm, QkNormAllHeads):
            name = attention.mechanism.name
            raise Incompatible(
                f"mechanism {name!r} normalises all heads together, so they cannot be pooled", mechanism=name
            )
        specs.append(spec)
    return specs


@dataclass(frozen=True)
class HeadMap:
    """`groups[head]` is the new key/value head, from 0, of each old one; every new head has at least one old one."""

    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.groups or set(self.groups) != set(range(max(self.groups, default=-1) + 1)):
            raise InvalidValue.of(
                "groups", self.groups, "a group for each key/value head, numbered from 0 without gaps"
            )

    @classmethod
    def consecutive(cls, heads: int, groups: int) -> HeadMap:
        """`heads` in equal groups of consecutive heads; raises `InvalidValue` if `groups` does not divide them."""
        if groups < 1 or heads % groups:
            raise InvalidValue.of("kv_heads", groups, f"a divisor of the {heads} key/value heads, or an explicit map")
        share = heads // groups
        return cls(tuple(head // share for head in range(heads)))

    @property
    def count(self) -> int:
        """The number of new heads."""
        return max(self.groups) + 1

    def members(self, group: int) -> list[int]:
        """The old heads of a group, in order."""
        return [head for head, own in enumerate(self.groups) if own == group]


Method = Literal["mean", "first", "random"]
METHODS: tuple[Method, ...] = get_args(Method)


def pooled(weight: Tensor, heads: HeadMap, method: Method, generator: torch.Generator) -> Tensor:
    """The weight [groups · size, ...] of the pooled heads from that of the old heads, [heads · size, ...].

    `mean` is the least-squares fit of a group; `first` takes the first head of each group; `random` draws new weights
    from N(0, 0.02²) for comparison, and zeros for biases (Ainslie et al. 2023, arXiv 2305.13245, section 2.1 and figure
    4).
    """
    old = by_head(weight, len(heads.groups))
    if method == "random":
        shape = (heads.count, *old.shape[1:])
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * STANDARD
        return (drawn if weight.ndim > 1 else drawn * 0).to(weight.dtype).flatten(0, 1)
    chosen = [old[heads.members(group)] for group in range(heads.count)]
    new = [group.double().mean(0) if method == "mean" else group[0] for group in chosen]
    return torch.stack(new).to(weight.dtype).flatten(0, 1)


def energy_kept(weight: Tensor, new: Tensor, heads: HeadMap) -> tuple[float, float]:
    """The squared norm of `weight` [heads · size, ...], and its squared distance from the pooled weight `new`."""
    old = by_head(weight.double(), len(heads.groups))
    repeated = by_head(new.double(), heads.count)[list(heads.groups)]
    return old.square().sum().item(), (old - repeated).square().sum().item()


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Reshape rows [heads · size, ...] to [heads, size, ...]."""
    return rows.reshape(heads, -1, *rows.shape[1:])


def fewer_heads(model: Decoder, heads: HeadMap, method: Method, *, seed: int = 0) -> tuple[Decoder, float]:
    """The decoder whose key/value heads are pooled by `heads`, and the energy kept.

    The energy is the share of the squared norm of the key and value weights W that pooling keeps, 1 - |W - pooled|² /
    |W|²: at most 1, and negative where the pooled weights are further from W than zeros would be. Query heads of equal
    groups are reordered to be consecutive, so that other libraries can read them. Raises `InvalidValue` for a map of
    another number of heads, `Incompatible` for attention without such heads.
    """
    specs = specs_of(model.config)
    layouts = {spec.heads for spec in specs}
    if len(layouts) > 1:
        raise Incompatible(f"the layers have {len(layouts)} layouts of heads; only models with one can be converted")
    old = layouts.pop()
    if len(heads.groups) != old.key_value:
        raise InvalidValue.of("groups", heads.groups, f"{old.key_value} entries, one for each key/value head")
    query_groups = tuple(heads.groups[own] for own in old.group_of)
    order = _order(query_groups)
    after = tuple(query_groups[head] for head in order)
    generator = torch.Generator().manual_seed(seed)
    tensors, energy, lost = {}, 0.0, 0.0
    for name, tensor in model.state_dict().items():
        leaf = name.partition(".attention.")[2]
        if leaf in PROJECTIONS:
            tensors[name] = pooled(tensor, heads, method, generator)
            norm, missed = energy_kept(tensor, tensors[name], heads)
            energy, lost = energy + norm, lost + missed
        else:
            tensors[name] = _reordered(leaf, tensor, order, old.query)
    converted = Decoder(_config(model.config, old, heads.count, after)).to(model.embedding.weight.dtype)
    converted.load_state_dict(tensors)
    return converted.train(model.training), 1 - lost / energy


def _order(groups: tuple[int, ...]) -> list[int]:
    """The query heads sorted by group where groups have equal sizes, else in their present order."""
    sizes = {groups.count(group) for group in groups}
    heads = range(len(groups))
    return sorted(heads, key=lambda head: groups[head]) if len(sizes) == 1 else list(heads)


def _reordered(leaf: str, tensor: Tensor, order: list[int], heads: int) -> Tensor:
    """Apply the new order of heads to the rows of query weights and the columns of the output weight."""
    if leaf in {"query.weight", "query.bias"}:
        return by_head(tensor, heads)[order].flatten(0, 1)
    if leaf == "output.weight":
        return tensor.reshape(tensor.shape[0], heads, -1)[:, order].flatten(1, 2)
    return tensor


def _config(config: DecoderConfig, old: Heads, count: int, groups: tuple[int, ...]) -> DecoderConfig:
    """The config with `count` key/value heads; `gqa` replaces mechanisms without grouped heads."""
    regular = len(groups) % count == 0 and groups == HeadMap.consecutive(len(groups), count).groups
    options = {} if regular else {"groups": groups}

    def choice(given: AttentionChoice) -> AttentionChoice:
        registry = installed().mechanisms
        mechanism, name = registry.get(given.mechanism), registry.full_name(given.mechanism)
        own = {name: value for name, value in given.options.items() if name != "groups"}
        if mechanism.can(Capability.GROUPED) and (regular or name == "attn-variants/gqa"):
            return AttentionChoice(mechanism=given.mechanism, options=own | options)
        if own or name not in {"attn-variants/mha", "attn-variants/mqa"}:
            what = "fewer key/value heads" if regular else "unequal groups of heads"
            raise Incompatible(f"mechanism {mechanism.name!r} does not support {what}", mechanism=mechanism.name)
        return AttentionChoice(mechanism="attn-variants/gqa", options=options)

    first = choice(AttentionChoice(mechanism=config.mechanism, options=config.options))
    pattern = tuple(choice(given) for given in config.pattern)
    return dataclasses.replace(
        config,
        num_kv_heads=count,
        head_dim=old.key_size,
        mechanism=first.mechanism,
        options=first.options,
        pattern=pattern,
    )
