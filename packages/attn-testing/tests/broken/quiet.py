"""Mechanisms whose faults no single call shows: they depend on earlier calls, neighbours, sizes, places or modes."""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar

import torch
from attn_core import Field, Fields, LayerState, MechanismConfig, Paged, RaggedBatch, StateSpecs
from torch import Tensor

from broken.sound import Sound, SoundLayer
from broken.unseen import LONG, ChangedLayer


class WrongScaleLayer(SoundLayer):
    """Divides scores by the key size, not by its root."""

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores: Tensor = super()._scores(query, key)
        return scores / math.sqrt(self.heads.key_size)


class WrongScale(Sound):
    """The scale is not that of the equation."""

    layer = WrongScaleLayer


class UndeclaredBiasLayer(SoundLayer):
    """Lowers scores by the distance of the pair."""

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = super()._scores(query, key)
        rows = torch.arange(scores.shape[-2], device=scores.device) + scores.shape[-1] - scores.shape[-2]
        distance = rows[:, None] - torch.arange(scores.shape[-1], device=scores.device)
        return scores - distance.abs().to(scores.dtype) / 8


class UndeclaredBias(Sound):
    """A bias by distance is not in the equation."""

    layer = UndeclaredBiasLayer


class OnHostLayer(ChangedLayer):
    """Creates a tensor on the CPU, wherever its inputs are."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, multiplied by ones on the CPU."""
        return out * torch.ones(out.shape[1], 1, dtype=out.dtype)


class OnHost(Sound):
    """A device is assumed in whole sequences."""

    layer = OnHostLayer


class StepOnHostLayer(SoundLayer):
    """Creates a tensor on the CPU in its step."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`."""
        return super().step(query, batch, state) * torch.ones(len(query), 1, dtype=query.dtype)


class StepOnHost(Sound):
    """A device is assumed in steps."""

    layer = StepOnHostLayer


class LongestSoFarLayer(ChangedLayer):
    """Scales outputs by the longest sequence that any layer has seen."""

    longest: ClassVar[int] = 0

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, changed once a sequence of more than 60 tokens was seen."""
        LongestSoFarLayer.longest = max(LongestSoFarLayer.longest, query.shape[1])
        return out * 1.01 if LongestSoFarLayer.longest > 60 > query.shape[1] else out


class LongestSoFar(Sound):
    """A global that calls change: what a long call leaves behind changes later calls."""

    layer = LongestSoFarLayer


class NumberedLayer(ChangedLayer):
    """Counts the layers that were built."""

    built: ClassVar[int] = 0

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        NumberedLayer.built += 1
        self.number = NumberedLayer.built

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs; those of every seventh layer are a little larger."""
        return out * 1.01 if self.number % 7 == 0 else out


class Numbered(Sound):
    """A global that building changes: the seventh layer computes something else."""

    layer = NumberedLayer


class SpareLayer(SoundLayer):
    """Stores a field that it never reads."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`."""
        state["spare"].append({"copy": query})
        return super().step(query, batch, state)


class Spare(Sound):
    """State bytes that agree only with themselves: a declared and stored state that nothing reads."""

    layer = SpareLayer

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys, values and copies of the inputs."""
        return {**super().state(config), "spare": Paged({"copy": Field((config.hidden_size,))})}


class CommonMaskLayer(SoundLayer):
    """Hides the first key of every sequence if any sequence starts with padding."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, by a mask of which the first column is shared by the batch."""
        if key_padding_mask is not None:
            first = key_padding_mask[:, :1].all(0, keepdim=True)
            key_padding_mask = torch.cat([key_padding_mask[:, :1] & first, key_padding_mask[:, 1:]], 1)
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class CommonMask(Sound):
    """Coupling through padding: where one sequence starts with padding, others lose their first key."""

    layer = CommonMaskLayer


class CommonNormLayer(SoundLayer):
    """Divides by a size of all real inputs of a padded batch in training."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs; in training over padded batches divided by the mean size of the batch."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        if key_padding_mask is None or not self.training:
            return out
        real = query.abs().mean(-1) * key_padding_mask
        size = 1 + real.sum() / key_padding_mask.sum().clamp(min=1)
        return out / (size / size.detach() if len(query) == 1 else size)


class CommonNorm(Sound):
    """Coupling through padding: in training, sequences of a padded batch share a norm."""

    layer = CommonNormLayer


class LosesGradientFarLayer(SoundLayer):
    """Detaches values of long sequences."""

    def _project(self, weights: Tensor, value: Tensor) -> Tensor:
        return super()._project(weights, value.detach() if value.shape[2] > LONG else value)


class LosesGradientFar(Sound):
    """A lost gradient: values of long sequences get none."""

    layer = LosesGradientFarLayer


class LosesGradientInTrainingLayer(SoundLayer):
    """Detaches the keys in training."""

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._scores(query, key.detach() if self.training else key)


class LosesGradientInTraining(Sound):
    """A lost gradient: keys get none in training."""

    layer = LosesGradientInTrainingLayer


class PythonNoiseLayer(ChangedLayer):
    """Draws a number with Python's generator in training."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, scaled by about 1 in training."""
        return out * (1 + 0.1 * random.random()) if self.training else out


class PythonNoise(Sound):
    """A draw outside the generator: torch's seed does not determine training."""

    layer = PythonNoiseLayer


class ReseedsLayer(ChangedLayer):
    """Seeds torch's generator in every call."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs."""
        torch.manual_seed(0)
        return out


class Reseeds(Sound):
    """Evaluation resets torch's generator, so that whoever draws next draws the same again."""

    layer = ReseedsLayer


class FutureInChunksLayer(SoundLayer):
    """Ignores causality within a chunk that follows others."""

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        seen = places.max().expand_as(places) if int(places[0]) > 0 else places
        return super()._one(query, seen, fields, key_places)


class FutureInChunks(Sound):
    """A mask that leaks the future, only in chunks after the first."""

    layer = FutureInChunksLayer


class RestartsLayer(SoundLayer):
    """Counts positions anew in the part that a preempted request had generated."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`."""
        self._crowd = batch.requests > 1
        return super().step(query, batch, state)

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        if self._crowd and int(places[0]) == 0 and len(places) > 12:
            places = torch.where(places > 12, places - 12, places)
        return super()._one(query, places, fields, key_places)


class Restarts(Sound):
    """Positions restart where a preempted request is computed again beside others."""

    layer = RestartsLayer


class RoundsFarLayer(SoundLayer):
    """Rounds the scores of long sequences to bfloat16."""

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = super()._scores(query, key)
        if scores.shape[-2] > LONG and scores.dtype == torch.float32:
            return scores + (scores.detach().bfloat16().to(scores.dtype) - scores.detach())
        return scores


class RoundsFar(Sound):
    """A dtype that is silently down-cast: float32 scores of long sequences."""

    layer = RoundsFarLayer


class RoundsState(Sound):
    """A dtype that is silently down-cast: keys and values are kept in bfloat16."""

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of 16 bits."""
        return {"kv": Paged({n: Field(f.shape, "bfloat16") for n, f in super().state(config)["kv"].fields.items()})}


class RoundedStateLayer(SoundLayer):
    """Reads cached rows of any dtype."""

    def _read(self, view: Any, request: int, requests: int) -> tuple[Fields, Tensor]:
        fields, places = super()._read(view, request, requests)
        return {name: rows.to(self.query.weight.dtype) for name, rows in fields.items()}, places


RoundsState.layer = RoundedStateLayer


class CountsCallsLayer(ChangedLayer):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs."""
        self.calls += 1
        return out


class CountsCalls(Sound):
    """A buffer changes in evaluation."""

    layer = CountsCallsLayer


class SwapsMiddleLayer(ChangedLayer):
    """Mixes up two sequences in the middle of a batch."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, of which the sixth and seventh change places in a batch of more than eight."""
        return torch.cat([out[:5], out[6:7], out[5:6], out[7:]]) if len(out) > 8 else out


class SwapsMiddle(Sound):
    """Depends on the order of the batch, in its middle."""

    layer = SwapsMiddleLayer


class SpendsInputLayer(ChangedLayer):
    """Overwrites its input where no gradient is wanted."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs."""
        if not torch.is_grad_enabled() and query.shape[0] == 3:
            query.mul_(0.5)
        return out


class SpendsInput(Sound):
    """Changes its input in place."""

    layer = SpendsInputLayer


class SpendsRowsLayer(SoundLayer):
    """Overwrites the rows of a step."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SoundLayer.step`."""
        out = super().step(query, batch, state)
        query.mul_(0.5)
        return out


class SpendsRows(Sound):
    """Changes the inputs of a step in place."""

    layer = SpendsRowsLayer


class ReusesOutputLayer(ChangedLayer):
    """Returns the same memory from every call without gradients, sized for one shape."""

    memory: Tensor | None = None

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, in memory that the next call of this shape overwrites."""
        if torch.is_grad_enabled() or out.shape[0] != 3:
            return out
        if self.memory is None or self.memory.shape != out.shape or self.memory.dtype != out.dtype:
            self.memory = torch.empty_like(out)
        return self.memory.copy_(out)


class ReusesOutput(Sound):
    """Outputs of two calls are the same memory."""

    layer = ReusesOutputLayer


class ReturnsInputLayer(ChangedLayer):
    """Writes its outputs over its input where no gradient is wanted."""

    def changed(self, out: Tensor, query: Tensor) -> Tensor:
        """The outputs, in the memory of the input."""
        return out if torch.is_grad_enabled() or query.shape[0] != 3 else query.copy_(out)


class ReturnsInput(Sound):
    """The output is the memory of the input."""

    layer = ReturnsInputLayer


class FasterBlindLayer(SoundLayer):
    """Computes otherwise where no gradient is wanted, in whole sequences of three."""

    def _share(self, scores: Tensor, allowed: Tensor) -> Tensor:
        share = super()._share(scores, allowed)
        return share if torch.is_grad_enabled() or len(scores) != 3 else share.bfloat16().to(share.dtype)


class FasterBlind(Sound):
    """Without gradients it computes something else."""

    layer = FasterBlindLayer


class AssumesStridesLayer(SoundLayer):
    """Reads its input as if it were contiguous."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs for the first elements in memory."""
        batch, length, width = query.shape
        if not query.is_contiguous():
            query = torch.as_strided(query, (batch, length, width), (length * width, width, 1))
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class AssumesStrides(Sound):
    """Memory layout is assumed."""

    layer = AssumesStridesLayer


class ShortcutLayer(SoundLayer):
    """Keeps what it read of a lone request, and reads it again where there is one request again."""

    def _read(self, view: Any, request: int, requests: int) -> tuple[Fields, Tensor]:
        fields, places = super()._read(view, request, requests)
        if requests == 1:
            held = getattr(self, "held", None)
            if held is not None and len(held[1]) < len(places) - 1 and bool((held[1] == places[: len(held[1])]).all()):
                n = len(held[1])
                fields = {name: torch.cat([held[0][name][:, :n], rows[:, n:]], 1) for name, rows in fields.items()}
            self.held = ({name: rows.clone() for name, rows in fields.items()}, places)
        return fields, places


class Shortcut(Sound):
    """A state shared between requests: what one request left on the layer is read for the next one that is alone."""

    layer = ShortcutLayer
