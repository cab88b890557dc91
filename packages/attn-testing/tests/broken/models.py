"""A language model that keeps every law of models, and models that each break one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from attn_core import MechanismConfig, ModelFamily, RaggedBatch
from attn_core.batch import ModelState
from attn_core.errors import UnknownName
from attn_core.stores import ModelSpecs
from torch import Tensor, nn

from attn_testing.law import Law
from attn_testing.laws import models as laws_of_models
from broken.sound import Sound, SoundLayer

FIELDS = ("vocab_size", "hidden_size")


@dataclass(frozen=True)
class SoundConfig:
    """The sizes of the model."""

    vocab_size: int
    hidden_size: int

    @property
    def attention(self) -> MechanismConfig:
        """The config of the attention layer."""
        return MechanismConfig(hidden_size=self.hidden_size, num_heads=2)


class SoundModel(nn.Module):
    """A language model of one attention layer between embedding and unembedding."""

    max_seq_len = 32

    def __init__(self, config: SoundConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention = SoundLayer(config.attention)
        self.unembedding = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary]."""
        rows = self.embedding(tokens)
        return self.logits(rows + self.attention(rows))

    def state_specs(self) -> ModelSpecs:
        """The state specs: keys and values of the layer."""
        return {"attention": Sound().state(self.config.attention)}

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width]."""
        rows: Tensor = self.embedding(tokens)
        return rows + self.attention.step(rows, batch, state["attention"])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary]."""
        out: Tensor = self.unembedding(hidden)
        return out

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """The index of the first of the largest logits [rows]; -1 if it is not finite."""
        logits = self.logits(hidden)
        return logits.argmax(-1).where(logits.amax(-1).isfinite(), -1)


class SoundFamily(ModelFamily):
    """The family of `SoundModel` or one of its subclasses."""

    name: ClassVar[str] = "sound"
    summary: ClassVar[str] = "One layer of attention."

    def __init__(self, kind: type[SoundModel] = SoundModel) -> None:
        self.kind = kind

    def configure(self, values: Mapping[str, Any]) -> SoundConfig:
        """The config; raises `UnknownName` for other fields."""
        for name in values:
            if name not in FIELDS:
                raise UnknownName.of("field", name, FIELDS)
        return SoundConfig(**values)

    def build(self, config: SoundConfig) -> SoundModel:
        """Build a new model."""
        return self.kind(config)


class CarelessFamily(SoundFamily):
    """Breaks described: ignores unknown fields."""

    def configure(self, values: Mapping[str, Any]) -> SoundConfig:
        """The config of the known fields."""
        return super().configure({name: value for name, value in values.items() if name in FIELDS})


class Constant(SoundModel):
    """Breaks causality: logits do not depend on their token."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The same logits for all hidden states."""
        return super().logits(torch.zeros_like(hidden))


class Hurried(SoundModel):
    """Breaks steps: omits the residual connection for a chunk after others."""

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states, without the embedding for a later chunk of a request that is alone."""
        hidden = super().step(tokens, batch, state)
        alone = batch.requests == 1 and batch.contexts[0] > 0 and batch.lengths[0] > 1
        return hidden - self.embedding(tokens) if alone else hidden


class Mixed(SoundModel):
    """Breaks crowd equals alone: subtracts the mean over all rows in a step of several requests."""

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states that depend on those of other requests."""
        hidden = super().step(tokens, batch, state)
        return hidden - hidden.mean(0) if batch.requests > 1 else hidden


class Unscathed(SoundModel):
    """Breaks greedy tokens: returns a token even if the logits are NaN."""

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """The index of the largest logit, with NaN replaced by 0."""
        return self.logits(hidden).nan_to_num().argmax(-1)


class Forgetful(SoundModel):
    """Breaks saved and loaded: its scale is not in the state dict."""

    def __init__(self, config: SoundConfig) -> None:
        super().__init__(config)
        self.scale = 1 + torch.rand(()).item()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, multiplied by the scale."""
        return super().logits(hidden) * self.scale


BROKEN_MODELS: Mapping[type[Law], ModelFamily] = {
    laws_of_models.Described: CarelessFamily(),
    laws_of_models.Causality: SoundFamily(Constant),
    laws_of_models.StepEqualsForward: SoundFamily(Hurried),
    laws_of_models.CrowdEqualsAlone: SoundFamily(Mixed),
    laws_of_models.GreedyTokensOfLogits: SoundFamily(Unscathed),
    laws_of_models.SavedAndLoaded: SoundFamily(Forgetful),
}
"""For each law a model family that breaks it."""
