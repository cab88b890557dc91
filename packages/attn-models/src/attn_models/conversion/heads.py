"""A decoder with fewer key/value heads (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import Capability, Heads, installed
from attn_core.errors import Incompatible, InvalidValue
from torch import Tensor

from attn_models.conversion.attentions import PROJECTIONS, specs_of
from attn_models.conversion.groups import HeadMap
from attn_models.conversion.pooling import Method, by_head, energy_kept, pooled
from attn_models.decoder.config import AttentionChoice, DecoderConfig
from attn_models.decoder.decoder import Decoder


def fewer_heads(model: Decoder, heads: HeadMap, method: Method, *, seed: int = 0) -> tuple[Decoder, float]:
    """The decoder whose key/value heads are pooled by `heads`, and the energy kept.

    The energy is the share of the squared norm of the key and value weights W that pooling keeps, 1 - |W - pooled|² /
    |W|²: at most 1, and below 0 where the pooled are further off than zeros would be. Query heads of equal groups are
    put beside each other, so that other libraries can read them. Raises `InvalidValue` for a map of another number of
    heads, `Incompatible` for attention without such heads.
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
    """Query heads group by group where groups are equal, else as they are."""
    sizes = {groups.count(group) for group in groups}
    heads = range(len(groups))
    return sorted(heads, key=lambda head: groups[head]) if len(sizes) == 1 else list(heads)


def _reordered(leaf: str, tensor: Tensor, order: list[int], heads: int) -> Tensor:
    """Rows of the queries and columns of the output in the new order of heads."""
    if leaf in {"query.weight", "query.bias"}:
        return by_head(tensor, heads)[order].flatten(0, 1)
    if leaf == "output.weight":
        return tensor.reshape(tensor.shape[0], heads, -1)[:, order].flatten(1, 2)
    return tensor


def _config(config: DecoderConfig, old: Heads, count: int, groups: tuple[int, ...]) -> DecoderConfig:
    """The config with `count` key/value heads; `gqa` takes the place of mechanisms that share none."""
    regular = len(groups) % count == 0 and groups == HeadMap.consecutive(len(groups), count).groups
    options = {} if regular else {"groups": groups}

    def choice(given: AttentionChoice) -> AttentionChoice:
        mechanism = installed().mechanisms.get(given.mechanism)
        own = {name: value for name, value in given.options.items() if name != "groups"}
        if mechanism.can(Capability.GROUPED) and (regular or mechanism.name == "gqa"):
            return AttentionChoice(mechanism=given.mechanism, options=own | options)
        if own or mechanism.name not in {"mha", "mqa"}:
            what = "no fewer key/value heads" if regular else "no unequal groups of heads"
            raise Incompatible(f"mechanism {mechanism.name!r} takes {what}", mechanism=mechanism.name)
        return AttentionChoice(mechanism="gqa", options=options)

    first = choice(AttentionChoice(mechanism=config.mechanism, options=config.options))
    pattern = tuple(choice(given) for given in config.pattern)
    return dataclasses.replace(
        config,
        key_value_heads=count,
        head_size=old.key_size,
        mechanism=first.mechanism,
        options=first.options,
        pattern=pattern,
    )
