"""Mechanisms that break one law each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_core import (
    Capability,
    Cost,
    Field,
    Fields,
    LayerState,
    MechanismConfig,
    Paged,
    RaggedBatch,
    Shape,
    StateSpecs,
    Step,
)
from attn_core.batch import PagedView
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from broken.sound import Sound, SoundLayer

FAR = 4

UNREAD = r"\alpha_i = \mathrm{softmax}(K q_i / \sqrt{d_k})"
"""An equation that is not among those which the law of the equation reads."""


class LargeLeakLayer(SoundLayer):
    """Prevents overflow by the maximum of the whole sequence."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, scaled down if any input of the sequence is large."""
        most = query.detach().abs().amax((1, 2), keepdim=True)
        scale = torch.clamp(most / 1000, min=1.0) if self.causal else 1.0
        return super().forward(query, source, key_padding_mask=key_padding_mask) / scale


class LargeLeak(Sound):
    """Breaks causality by perturbation: a large later input has an effect, though no gradient."""

    layer = LargeLeakLayer


class GradientLeakLayer(SoundLayer):
    """Adds a straight-through term whose value is zero."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, with gradients to inputs `FAR` positions ahead."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        if not self.causal or query.shape[1] <= FAR:
            return out
        ahead = torch.roll(query, -FAR, 1)
        return out + (ahead - ahead.detach())


class GradientLeak(Sound):
    """Breaks causality by gradient: outputs have gradients to inputs four positions ahead, but no dependence."""

    layer = GradientLeakLayer


class NeverAheadLayer(SoundLayer):
    """Always causal, whatever the config says."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.causal = True


class NeverAhead(Sound):
    """Breaks bidirectionality: `causal=False` is accepted and ignored."""

    layer = NeverAheadLayer


class UnnormalisedLayer(SoundLayer):
    """Returns weights that are not normalised."""

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound weights [batch, heads, query, key], multiplied by the number of keys."""
        normalised = super().weights(query, source, key_padding_mask=key_padding_mask)
        return normalised * normalised.shape[-1]


class Unnormalised(Sound):
    """Breaks row sums: the returned weights are not those that it uses."""

    layer = UnnormalisedLayer
    equation = UNREAD


class UniformWhenBlindLayer(SoundLayer):
    """Attends to all keys if none is allowed, as with a large negative number in place of minus infinity."""

    def _share(self, scores: Tensor, allowed: Tensor) -> Tensor:
        some = allowed.any(-1, keepdim=True)
        return torch.softmax(scores.masked_fill(~allowed & some, -math.inf), -1)


class UniformWhenBlind(Sound):
    """Breaks no allowed key: such a query gets an average of all values."""

    layer = UniformWhenBlindLayer


class LateMaskLayer(SoundLayer):
    """Masks padding after the softmax, so that padded keys still take their share."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Outputs by weights that do not sum to one if there is padding."""
        weights = self._weights(query, source, None)
        weights = weights if key_padding_mask is None else weights * key_padding_mask[:, None, None, :]
        return self._project(weights, self._split(self.value(query), self.heads.key_value))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("this layer has no attention weights")


class LateMask(Sound):
    """Breaks padding invariance: padded keys are part of the denominator of the softmax."""

    layer = LateMaskLayer
    capabilities = Sound.capabilities - {Capability.WEIGHTS, Capability.NORMALISED}
    counts_from_start = True  # so that the law of padding in front finds nothing


class IgnoredMaskLayer(SoundLayer):
    """Accepts a mask of padded keys and ignores it."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs without the padding mask."""
        return super().forward(query, source)


class IgnoredMask(Sound):
    """Breaks undeclared: without the capability PADDING, a padding mask must be refused."""

    layer = IgnoredMaskLayer
    capabilities = Sound.capabilities - {Capability.PADDING}


class RubbishLayer(SoundLayer):
    """Reads the rows of all requests (except in a tree) together, and ignores which of them are padding."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`."""
        self._in_tree = bool(batch.paths)
        return super().step(query, batch, state)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        if self._in_tree:
            return super()._read(view, request, requests)
        held = view.rows(range(requests))
        return {name: rows[request : request + 1] for name, rows in held.fields.items()}, held.positions[request]


class Rubbish(Sound):
    """Breaks batch invariance: a request in a batch with a longer one attends to padding."""

    layer = RubbishLayer


class Louder(torch.autograd.Function):
    """The identity, with a gradient of 1.5."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        """Return a copy of the rows."""
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient, multiplied by 1.5."""
        return gradients[0] * 1.5


class WrongBackwardLayer(SoundLayer):
    """Has a backward of its own, which is wrong."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, with wrong gradients to `query`."""
        louder: Tensor = Louder.apply(query)  # type: ignore[no-untyped-call]
        return super().forward(louder, source, key_padding_mask=key_padding_mask)


class WrongBackward(Sound):
    """Breaks gradients: they are not those of the forward pass."""

    layer = WrongBackwardLayer


class WidensLayer(SoundLayer):
    """Returns float32 outputs for inputs of 16 bits."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, in at least float32."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        return out.float() if out.element_size() == 2 else out


class Widens(Sound):
    """Breaks precision: the outputs do not have the dtype of the inputs."""

    layer = WidensLayer


class HiddenWeightLayer(SoundLayer):
    """Draws a random number that is not in its state dict."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.temperature = 1.0 + torch.rand(()).item()

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._scores(query, key) / self.temperature


class HiddenWeight(Sound):
    """Breaks saved and loaded: the number that was drawn is lost."""

    layer = HiddenWeightLayer
    equation = UNREAD


class LooksInsideLayer(SoundLayer):
    """Branches on the value of a tensor, which a graph cannot capture."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs."""
        if query.numel() and not query.is_meta and query.detach().abs().max().item() > 1e30:
            query = query / 2
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class LooksInside(Sound):
    """Breaks compiles: reading a value causes a graph break."""

    layer = LooksInsideLayer


class UnscaledStepLayer(SoundLayer):
    """Omits the scale of the scores in its step."""

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        louder = {"key": fields["key"] * math.sqrt(self.heads.key_size), "value": fields["value"]}
        return super()._one(query, places, louder, key_places)


class UnscaledStep(Sound):
    """Breaks decode equals forward: the step consistently computes another function."""

    layer = UnscaledStepLayer


class TopLeftLayer(SoundLayer):
    """Aligns the causal mask of a chunk with the first key in the cache, not the last."""

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        if len(places) > 1:
            places = places - places[0]
        return super()._one(query, places, fields, key_places)


class TopLeft(Sound):
    """Breaks chunked prefill: a chunk after others does not attend to all of them."""

    layer = TopLeftLayer


class OrphanLayer(SoundLayer):
    """Lets a token of a tree attend to the tokens before the tree and itself, but to none of its ancestors."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`."""
        self._ancestors = [max(0, len(batch.path(request)) - 1) for request in range(batch.requests)]
        return super().step(query, batch, state)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        fields, places = super()._read(view, request, requests)
        last = len(places) - 1
        seen = [*range(last - self._ancestors[request]), last]
        return {name: rows[:, seen] for name, rows in fields.items()}, places[seen]


class Orphan(Sound):
    """Breaks tree equals paths: tokens do not attend to their ancestors in the tree."""

    layer = OrphanLayer


class OverstatedState(Sound):
    """Breaks state bytes: declares values of twice their size."""

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys, and values of twice their size."""
        heads = config.head_layout
        key, value = (heads.key_value, heads.key_size), (heads.key_value, 2 * heads.key_size)
        return {"kv": Paged({"key": Field(key), "value": Field(value)})}


class NoEquation(Sound):
    """Breaks described: it has no equation."""

    equation = ""


class RefusesGroups(Sound):
    """Breaks settings: GROUPED is declared, but grouped heads are refused."""

    def build(self, config: MechanismConfig) -> nn.Module:
        """A layer; raises `InvalidValue` for grouped heads."""
        if config.num_kv_heads not in {None, config.num_heads}:
            raise InvalidValue.of("num_kv_heads", config.num_kv_heads, f"{config.num_heads}")
        return super().build(config)


class UncheckedLayer(SoundLayer):
    """Multiplies scores by a number."""

    coldness = 1.0

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._scores(query, key) * self.coldness


class Unchecked(Sound):
    """Breaks options: the temperature is not checked before it is used as a divisor."""

    layer = UncheckedLayer

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """The config with a `temperature` by which scores are divided."""

        temperature: float = 1.0

    def build(self, config: MechanismConfig) -> nn.Module:
        """A layer with this temperature; raises `ZeroDivisionError` for 0."""
        layer = super().build(config)
        layer.coldness = 1 / self.Config.of(config).temperature  # type: ignore[assignment]
        return layer


class Cheap(Sound):
    """Breaks declared cost: the projections are not counted."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost without the projections."""
        sound = super().cost(config, shape)
        if isinstance(shape, Step):
            return sound
        pairs = 4 * config.num_heads * config.head_layout.key_size * shape.batch * shape.query * shape.key
        return replace(sound, flops=pairs, allowed_flops=pairs)


class Forgetful(Sound):
    """Breaks step cost: cached keys and values are counted as if they were projected again."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of a step that projects keys and values of all tokens."""
        sound = super().cost(config, shape)
        heads = config.head_layout
        again = 2 * shape.batch * shape.remembered * config.hidden_size * 2 * heads.key_value * heads.key_size
        return replace(sound, flops=sound.flops + again)
