"""Mechanisms whose faults show only in training, with many tokens, sequences or requests, or in declarations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from attn_core import Capability, Cost, Fields, LayerState, MechanismConfig, RaggedBatch, Shape, Step
from attn_core.batch import PagedView
from torch import Tensor, nn

from broken.mechanisms import UNREAD
from broken.sound import Sound, SoundLayer

LONG, MANY, CROWD = 24, 16, 4
"""The numbers of tokens, sequences of a batch and requests of a step beyond which the faults begin."""


class ChangedLayer(SoundLayer):
    """The sound layer with changed outputs."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, changed by `changed`."""
        return self.changed(super().forward(query, source, key_padding_mask=key_padding_mask), query)

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """Change the sound outputs; subclasses override this."""
        return out


class LouderInTrainingLayer(ChangedLayer):
    """Scales outputs in training but not in evaluation."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, multiplied by 1.5 in training."""
        return 1.5 * out if self.training else out


class LouderInTraining(Sound):
    """Breaks training: training computes another function than evaluation."""

    layer = LouderInTrainingLayer


class NoNumberInTrainingLayer(ChangedLayer):
    """Divides by a spread that may be zero, in training only."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, of which the first is NaN in training."""
        spread = torch.arange(out.shape[1], device=out.device, dtype=out.dtype)[:, None]
        return out * spread / spread if self.training else out


class NoNumberInTraining(Sound):
    """Breaks training: an output is NaN."""

    layer = NoNumberInTrainingLayer


class LeaksInTrainingLayer(ChangedLayer):
    """Subtracts the mean over the whole sequence, in training only."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, less their mean in training."""
        return out - out.mean(1, keepdim=True) if self.training and self.causal else out


class LeaksInTraining(Sound):
    """Breaks causality in training only."""

    layer = LeaksInTrainingLayer


class LeaksFarLayer(ChangedLayer):
    """Lets the first output depend on the last token of a long sequence."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, with the last one added to the first in a long sequence."""
        if not self.causal or out.shape[1] <= LONG:
            return out
        first = torch.arange(out.shape[1], device=out.device)[:, None] == 0
        return torch.where(first, out + out[:, -1:], out)


class LeaksFar(Sound):
    """Breaks causality for long sequences."""

    layer = LeaksFarLayer


class LargeBatchLayer(ChangedLayer):
    """Mixes up the sequences of a large batch."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs; in a large batch those of the last sequence are replaced by those of the first."""
        return torch.cat([out[:-1], out[:1]]) if out.shape[0] > MANY else out


class LargeBatch(Sound):
    """Breaks batch invariance for many sequences."""

    layer = LargeBatchLayer


class ForgetsLayer(SoundLayer):
    """Loses the oldest row of a long request."""

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        fields, places = super()._read(view, request, requests)
        if len(places) <= LONG:
            return fields, places
        return {name: rows[:, 1:] for name, rows in fields.items()}, places[1:]


class Forgets(Sound):
    """Breaks decode equals forward for many tokens."""

    layer = ForgetsLayer


class CrowdedLayer(SoundLayer):
    """Reads the rows of the last request for the first one in a step of many requests."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`; the tokens of a tree do not count as requests."""
        self._crowd = 0 if batch.paths else batch.requests
        return super().step(query, batch, state)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        return super()._read(view, requests - 1 if self._crowd > CROWD and request == 0 else request, requests)


class Crowded(Sound):
    """Breaks batch invariance for many requests."""

    layer = CrowdedLayer


class UnrelatedLayer(SoundLayer):
    """Returns equal weights, whichever weights it uses."""

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Equal weights [batch, heads, query, key] for all keys that are attended to."""
        seen = super().weights(query, source, key_padding_mask=key_padding_mask) > 0
        return seen / seen.sum(-1, keepdim=True).clamp(min=1).to(query.dtype)


class Unrelated(Sound):
    """Breaks weights of output: the returned weights sum to one, but are not those that it uses."""

    layer = UnrelatedLayer
    equation = UNREAD


class Without(Sound):
    """Ignores one field of the config, here `bias`."""

    ignored: ClassVar[tuple[str, Any]] = ("bias", False)

    def build(self, config: MechanismConfig) -> nn.Module:
        """Build a layer as if the field had its default."""
        field, value = self.ignored
        return super().build(replace(config, **{field: value}))

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of that layer."""
        field, value = self.ignored
        return super().cost(replace(config, **{field: value}), shape)


class WithoutGroups(Without):
    """Ignores `num_kv_heads`, so heads do not share keys and values."""

    ignored = ("num_kv_heads", None)


class WithoutHeadSize(Without):
    """Ignores `head_dim`."""

    ignored = ("head_dim", None)


class WithoutRotary(Without):
    """Declares and ignores rotary positions."""

    capabilities = Sound.capabilities | {Capability.ROTARY}
    ignored = ("rotary", None)


class Idle(Sound):
    """Breaks every option acts: its option is not used."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """The config with a `temperature` that has no effect."""

        temperature: float = 1.0


class Unwritable(Sound):
    """Breaks described: the equation is not valid LaTeX."""

    equation = r"\mathrm{softmax}\left(q^\top k / \sqrt{d_k}\right V"


class Free(Sound):
    """Breaks declared cost: no FLOPs are declared for allowed pairs."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost with no allowed FLOPs."""
        return replace(super().cost(config, shape), allowed_flops=0)


class Paid(Sound):
    """Breaks step cost: steps have negative FLOPs."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost, with negative FLOPs for steps."""
        sound = super().cost(config, shape)
        return replace(sound, flops=-sound.flops) if isinstance(shape, Step) else sound
