"""Mechanisms declared by an `AttentionSpec`, from which module, state and cost are derived."""

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
from attn_core.inner import InnerAttention
from attn_core.masks.ranges import size
from attn_core.masks.reach import Reach
from attn_core.mechanism import Capability, Mechanism, replay_state
from attn_core.spec import AttentionSpec
from attn_core.states import Field, Paged, Slot, Source, StateSpec, StateSpecs

IN_PLACE = ("plain", "float16", "int8", "int4")
"""The forms of cached rows (`RowsInPlace.form`) that a step of a spec can read in place."""


PINNED = "pinned"
"""The name of the state that holds the tokens which a mask pins, [pinned, ...] per field, in order of position."""


def allowed_pairs(spec: AttentionSpec, shape: Shape | Step) -> int:
    """The number of query-key pairs that the mask allows, summed over the heads where it differs by head.

    Queries are aligned to the end of their keys; where they attend to a source, their positions are counted from 0.
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
    """Base class of mechanisms given as data: implement `spec`, from which everything else is derived."""

    @property
    def drops_weights(self) -> bool:
        """True if the layer computes the spec alone; to be overridden where `inner` or `build` drop weights, too."""
        own = type(self)
        return own.build is DeclaredMechanism.build and own.inner is DeclaredMechanism.inner

    @property
    def splits_heads(self) -> bool:
        """True if the layer computes the spec alone; `splitting.require_split` then checks the parts of the spec."""
        own = type(self)
        return own.build is DeclaredMechanism.build and own.inner is DeclaredMechanism.inner

    def depends_on_padding(self, config: MechanismConfig) -> bool:
        """Whether `counts_from_start`, or a part of the spec counts positions from the start."""
        spec = self.spec(config)
        return self.counts_from_start or not (spec.cross or spec.relative)

    @property
    def output_bias_apart(self) -> bool:
        """True if `build` is not overridden."""
        return type(self).build is DeclaredMechanism.build

    @abstractmethod
    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention as data."""

    def build(self, config: MechanismConfig) -> Any:
        """Build the layer of the spec, with the installed package that computes specs (`attn-variants`)."""
        from attn_core.plugins.catalog import installed

        return installed().spec_layer(self.spec(config), config, self.inner(config))

    def inner(self, config: MechanismConfig) -> InnerAttention | None:  # noqa: ARG002 -- most need none
        """Build a module for what the spec alone does not describe; None where it describes everything."""
        return None

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- see the base
        """The attention of the spec; override it where `inner` does not use that."""
        return (Computation(asked=self.spec(config)),)

    def paged_computation(self, config: MechanismConfig) -> Computation | None:
        """The attention of the spec; None for cross-attention, with an inner module, and where tokens are pinned."""
        spec = self.spec(config)
        if spec.cross or self.inner(config) is not None or self.kept(config).pinned:
            return None
        return Computation(asked=spec, rows=IN_PLACE)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:  # noqa: ARG002 -- most need none
        """The fields that the inner module caches for each token besides its key and value."""
        return {}

    def projected(self, config: MechanismConfig) -> Heads:
        """The heads of the projections and the cache: those of the spec, unless its attention has other sizes."""
        return self.spec(config).heads

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys (as the score projects them, if it reads any) and values: where cross, of every source token; else of
        the tokens of `kept`, the last ones in a `Paged` state and pinned ones in a `Slot` state.

        A layer that attends to keys and values of another layer has no state. A causal layer without INCREMENTAL caches
        its inputs, to compute the whole sequence again.
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
        """The tokens of a sequence that are cached: all, or a window of the last ones and the pinned ones.

        A window has at least the token itself. All tokens are cached, and none is pinned, where `max_seq_len` is no
        more than the window and the pinned tokens together.
        """
        found, longest = self.spec(config).mask.reach(config.max_seq_len), config.max_seq_len
        if found.window is None:
            return found
        found = Reach(max(1, found.window), found.pinned)
        small = longest is not None and found.pinned and (found.window or 0) + found.count >= longest
        return Reach() if small else found

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections of queries, keys, values and output, and of the query-key pairs."""
        spec = self.spec(config)
        per_pair = spec.pair_flops()
        # A mask that differs by head counts the pairs of all heads; `per_pair` is the cost of a pair in all heads.
        allowed = allowed_pairs(spec, shape) * per_pair // (spec.mask.heads or 1)
        pairs = Cost(
            flops=shape.batch * shape.query * self.met_keys(config, shape) * per_pair,
            allowed_flops=shape.batch * allowed,
            parameters=0,
        )
        return self.projection_cost(config, shape) + pairs

    def met_keys(self, config: MechanismConfig, shape: Shape | Step) -> int:
        """The number of keys that the plain computation computes for every query, allowed by the mask or not.

        The source where cross, else the new tokens and the cached ones before them: in a step also the slots of all
        pinned tokens, filled or not.
        """
        states = self.state(dataclasses.replace(config, shares_kv=False))
        if any(isinstance(state, Source) for state in states.values()):
            return shape.source
        kept = [state.window for state in states.values() if isinstance(state, Paged)]
        reach = None if None in kept else max((window - 1 for window in kept if window is not None), default=0)
        pinned = 0 if shape.whole or PINNED not in states else self.kept(config).count
        return shape.query + (shape.remembered if reach is None else min(shape.remembered, reach)) + pinned

    def projection_cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The part of the cost that is per token, and all learned weights of the spec.

        Self-attention caches the keys before its queries, so that only new tokens are projected.
        """
        spec, heads = self.spec(config), self.projected(config)
        query_width = heads.query * heads.key_size
        kv_head_width = (heads.key_size if spec.score.reads_keys else 0) + heads.value_size
        kv_width = 0 if config.shares_kv else heads.key_value * kv_head_width
        output_width = heads.query * spec.heads.value_size
        per_query = 2 * config.hidden_size * (query_width + output_width) + spec.query_flops()
        per_key = 0 if config.shares_kv else 2 * config.hidden_size * kv_width + spec.key_flops()
        projected = shape.encoded if spec.cross else shape.query
        tokens = shape.batch * (shape.query * per_query + projected * per_key)
        biases = (query_width + kv_width if config.bias else 0) + (config.hidden_size if config.has_output_bias else 0)
        own = spec.parameters()
        if config.shares_kv and spec.norm is not None:
            own -= spec.norm.key_parameters(spec.heads)
        if config.shares_kv and spec.score.projects_keys:
            own -= math.prod(spec.score.weights(spec.heads)["key_weight"])
        return Cost(
            flops=tokens,
            allowed_flops=tokens,
            parameters=config.hidden_size * (query_width + kv_width + output_width) + biases + own,
        )
