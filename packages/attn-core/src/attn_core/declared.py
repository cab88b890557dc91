"""A mechanism given as an `AttentionSpec`: module, state and cost follow from the data."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from attn_core.computation import Computation
from attn_core.config import MechanismConfig
from attn_core.cost import Cost, Shape, Step
from attn_core.heads import Heads
from attn_core.masks.ranges import size
from attn_core.masks.reach import Reach
from attn_core.mechanism import Capability, InnerAttention, Mechanism, replay_state
from attn_core.spec import AttentionSpec
from attn_core.states import Field, Paged, Slot, Source, StateSpec, StateSpecs

IN_PLACE = ("plain", "int8", "int4")
"""Forms of rows that a step of a spec meets where a cache keeps them."""


PINNED = "pinned"
"""The state that keeps the tokens which a mask pins, [pinned, ...] of each field, in order of their positions."""


def allowed_pairs(spec: AttentionSpec, shape: Shape | Step) -> int:
    """How many pairs the mask allows, those of all heads where it differs by head.

    Queries stand at the end of their keys, those of a source at positions counted from the first.
    """
    if not spec.cross:
        return spec.mask.count(shape.query, shape.key)
    if spec.mask.kind == "full":
        return spec.mask.count(shape.query, shape.source)
    bound = spec.mask.over(shape.source)
    heads = [bound.of_head(head) for head in range(bound.heads or 1)]
    queries = range(shape.remembered, shape.remembered + shape.query)
    return sum(size(mask.runs(query, shape.source)) for mask in heads for query in queries)


class DeclaredMechanism(Mechanism):
    """Implement `spec`; everything else is derived."""

    @property
    def drops_weights(self) -> bool:
        """Wherever nothing but the spec is computed; to be overridden where `inner` or `build` drop them too."""
        own = type(self)
        return own.build is DeclaredMechanism.build and own.inner is DeclaredMechanism.inner

    @property
    def splits_heads(self) -> bool:
        """Wherever nothing but the spec is computed, for which `splits_over` decides."""
        own = type(self)
        return own.build is DeclaredMechanism.build and own.inner is DeclaredMechanism.inner

    @property
    def output_bias_apart(self) -> bool:
        """Wherever the layer is that of the spec."""
        return type(self).build is DeclaredMechanism.build

    @abstractmethod
    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention as data."""

    def build(self, config: MechanismConfig) -> Any:
        """The layer of the spec, from the installed package that computes specs (`attn-variants`)."""
        from attn_core.plugins.catalog import installed

        return installed().spec_layer(self.spec(config), config, self.inner(config))

    def inner(self, config: MechanismConfig) -> InnerAttention | None:  # noqa: ARG002 -- most need none
        """A fresh module that computes what the spec alone does not say; None where it says all."""
        return None

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- see the base
        """The attention of the spec; to be overridden where `inner` does without."""
        return (Computation(asked=self.spec(config)),)

    def paged_computation(self, config: MechanismConfig) -> Computation | None:
        """The attention of the spec, where nothing but the spec is computed."""
        spec = self.spec(config)
        if spec.cross or self.inner(config) is not None or self.kept(config).pinned:
            return None
        return Computation(asked=spec, rows=IN_PLACE)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:  # noqa: ARG002 -- most need none
        """What the inner module remembers of a token besides its key and value."""
        return {}

    def projected(self, config: MechanismConfig) -> Heads:
        """The heads as they are projected and remembered, where they meet in other sizes; else those of the spec."""
        return self.spec(config).heads

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys, as the score projects them, where it reads any, and values: of every source token where cross, else of
        what the mask `kept`: the last tokens, and in a state of fixed size those that it pins.

        A layer that attends to those of another layer has no state. One that is causal and not INCREMENTAL remembers
        its inputs, with which the whole sequence is computed again.
        """
        if config.shares_kv:
            return {}
        if self.can(Capability.CAUSAL) and not config.cross and not self.can(Capability.INCREMENTAL):
            return replay_state(config)
        spec, heads = self.spec(config), self.projected(config)
        row = spec.score.key_shape(spec.heads) if spec.score.projects_keys else (heads.key_value, heads.key_size)
        key = {"key": Field(row)} if spec.score.reads_keys else {}
        value = {"value": Field((heads.key_value, heads.value_size))}
        fields = {**key, **value, **self.further_fields(config)}
        if spec.cross:
            return {"source": Source(fields)}
        kept = self.kept(config)
        states: dict[str, StateSpec] = {"kv": Paged(fields, window=kept.window)}
        if kept.pinned:
            states[PINNED] = Slot({name: Field((kept.count, *row.shape), row.dtype) for name, row in fields.items()})
        return states

    def kept(self, config: MechanismConfig) -> Reach:
        """What of a sequence is remembered: a window, and tokens that stay; all where that is no more.

        A window has at least the token itself. Within a context of `max_seq_len` tokens nothing is pinned for good
        where the whole context is as small.
        """
        found, longest = self.spec(config).mask.reach(config.max_seq_len), config.max_seq_len
        if found.window is None:
            return found
        found = Reach(max(1, found.window), found.pinned)
        small = longest is not None and found.pinned and (found.window or 0) + found.count >= longest
        return Reach() if small else found

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Projections of queries, keys, values and output, and the pairs of queries and keys."""
        spec = self.spec(config)
        per_pair = spec.pair_flops()
        # A mask that differs by head counts the pairs of all heads, each of which pays its share of `per_pair`.
        allowed = allowed_pairs(spec, shape) * per_pair // (spec.mask.heads or 1)
        pairs = Cost(
            flops=shape.batch * shape.query * self.met_keys(config, shape) * per_pair,
            allowed_flops=shape.batch * allowed,
            parameters=0,
        )
        return self.projection_cost(config, shape) + pairs

    def met_keys(self, config: MechanismConfig, shape: Shape | Step) -> int:
        """How many keys the plain computation lets every query meet, allowed or not.

        The source where cross, else the new tokens and what the state keeps of those before them: in a step the places
        of all that is pinned, taken or not.
        """
        states = self.state(dataclasses.replace(config, shares_kv=False))
        if any(isinstance(state, Source) for state in states.values()):
            return shape.source
        kept = [state.window for state in states.values() if isinstance(state, Paged)]
        reach = None if None in kept else max((window - 1 for window in kept if window is not None), default=0)
        pinned = 0 if shape.whole or PINNED not in states else self.kept(config).count
        return shape.query + (shape.remembered if reach is None else min(shape.remembered, reach)) + pinned

    def projection_cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The part of the price that is paid per token, and all learned weights of the spec.

        Keys before the queries of a self-attention are remembered, so only new tokens are projected.
        """
        spec, heads = self.spec(config), self.projected(config)
        into = heads.query * heads.key_size
        row = (heads.key_size if spec.score.reads_keys else 0) + heads.value_size
        memory = 0 if config.shares_kv else heads.key_value * row
        out = heads.query * spec.heads.value_size
        per_query = 2 * config.hidden_size * (into + out) + spec.query_flops()
        per_key = 0 if config.shares_kv else 2 * config.hidden_size * memory + spec.key_flops()
        projected = shape.encoded if spec.cross else shape.query
        tokens = shape.batch * (shape.query * per_query + projected * per_key)
        biases = (into + memory if config.bias else 0) + (config.hidden_size if config.has_output_bias else 0)
        own = spec.parameters()
        if config.shares_kv and spec.norm is not None:
            own -= spec.norm.key_parameters(spec.heads)
        if config.shares_kv and spec.score.projects_keys:
            own -= math.prod(spec.score.weights(spec.heads)["key_weight"])
        return Cost(
            flops=tokens,
            allowed_flops=tokens,
            parameters=config.hidden_size * (into + memory + out) + biases + own,
        )
