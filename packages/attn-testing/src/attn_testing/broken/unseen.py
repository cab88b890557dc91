"""Mechanisms whose faults show only in training, among many tokens, rows or requests, or in what was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from attn_core import Capability, Cost, Fields, LayerState, MechanismConfig, RaggedBatch, Shape, Step
from attn_core.batch import PagedView
from torch import Tensor, nn

from attn_testing.broken.sound import Sound, SoundLayer

LONG, MANY, CROWD = 24, 16, 4
"""Beyond so many tokens, sequences of a batch and requests of a step the faults begin."""


class ChangedLayer(SoundLayer):
    """The sound layer, whose output is changed."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows, changed."""
        return self.changed(super().forward(query, source, key_padding_mask=key_padding_mask), query)

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """What becomes of the sound rows."""
        return out


class LouderInTrainingLayer(ChangedLayer):
    """Scales in training what it does not scale in evaluation."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The rows, half as large again in training."""
        return 1.5 * out if self.training else out


class LouderInTraining(Sound):
    """Breaks training: a model is trained for another function than it serves."""

    layer = LouderInTrainingLayer


class NoNumberInTrainingLayer(ChangedLayer):
    """Divides by a spread that may be zero, in training alone."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The rows, of which the first is no number in training."""
        spread = torch.arange(out.shape[1], device=out.device, dtype=out.dtype)[:, None]
        return out * spread / spread if self.training else out


class NoNumberInTraining(Sound):
    """Breaks training: an output is no number."""

    layer = NoNumberInTrainingLayer


class LeaksInTrainingLayer(ChangedLayer):
    """Centres by the mean of the whole sequence, in training alone."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The rows, less their mean in training."""
        return out - out.mean(1, keepdim=True) if self.training and self.causal else out


class LeaksInTraining(Sound):
    """Breaks causality in training, where it matters most."""

    layer = LeaksInTrainingLayer


class LeaksFarLayer(ChangedLayer):
    """Lets the first token see the last of a long sequence."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The rows, with the last one's in the first where there are many."""
        if not self.causal or out.shape[1] <= LONG:
            return out
        first = torch.arange(out.shape[1], device=out.device)[:, None] == 0
        return torch.where(first, out + out[:, -1:], out)


class LeaksFar(Sound):
    """Breaks causality among many tokens."""

    layer = LeaksFarLayer


class LargeBatchLayer(ChangedLayer):
    """Confuses the sequences of a large batch."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The rows, the first sequence's in the place of the last of many."""
        return torch.cat([out[:-1], out[:1]]) if out.shape[0] > MANY else out


class LargeBatch(Sound):
    """Breaks batch invariance of many sequences."""

    layer = LargeBatchLayer


class ForgetsLayer(SoundLayer):
    """Loses the oldest row of a long request."""

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        fields, places = super()._read(view, request, requests)
        if len(places) <= LONG:
            return fields, places
        return {name: rows[:, 1:] for name, rows in fields.items()}, places[1:]


class Forgets(Sound):
    """Breaks decoding of many tokens."""

    layer = ForgetsLayer


class CrowdedLayer(SoundLayer):
    """Reads the rows of the last request of a crowd for its first."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """As `SoundLayer.step`; requests of a tree are none."""
        self._crowd = 0 if batch.paths else batch.requests
        return super().step(query, batch, state)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        return super()._read(view, requests - 1 if self._crowd > CROWD and request == 0 else request, requests)


class Crowded(Sound):
    """Breaks batch invariance of many requests."""

    layer = CrowdedLayer


class UnrelatedLayer(SoundLayer):
    """Shows equal weights, whatever it computes with."""

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Equal shares of the keys that are seen."""
        seen = super().weights(query, source, key_padding_mask=key_padding_mask) > 0
        return seen / seen.sum(-1, keepdim=True).clamp(min=1).to(query.dtype)


class Unrelated(Sound):
    """Breaks the weights of the output: what it shows is right in every sum, and not what it uses."""

    layer = UnrelatedLayer


class Without(Sound):
    """Ignores one field of the config, here biases."""

    ignored: ClassVar[tuple[str, Any]] = ("bias", False)

    def build(self, config: MechanismConfig) -> nn.Module:
        """A layer as if the field had its default."""
        field, value = self.ignored
        return super().build(replace(config, **{field: value}))

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The price of that layer."""
        field, value = self.ignored
        return super().cost(replace(config, **{field: value}), shape)


class WithoutGroups(Without):
    """Ignores that heads are to share keys and values."""

    ignored = ("num_kv_heads", None)


class WithoutHeadSize(Without):
    """Ignores the size of the heads."""

    ignored = ("head_dim", None)


class WithoutRotary(Without):
    """Declares and ignores rotary positions."""

    capabilities = Sound.capabilities | {Capability.ROTARY}
    ignored = ("rotary", None)


class Idle(Sound):
    """Breaks that every option acts: nothing knows of this one."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """A `temperature` that changes nothing."""

        temperature: float = 1.0


class Unwritable(Sound):
    """Breaks described: the equation is no LaTeX."""

    equation = r"\mathrm{softmax}\left(q^\top k / \sqrt{d_k}\right V"


class Free(Sound):
    """Breaks declared cost: a perfect kernel would do nothing."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The price, none of it for allowed pairs."""
        return replace(super().cost(config, shape), allowed_flops=0)


class Paid(Sound):
    """Breaks declared cost: steps are paid for being taken."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The price, negative for steps."""
        sound = super().cost(config, shape)
        return replace(sound, flops=-sound.flops) if isinstance(shape, Step) else sound
