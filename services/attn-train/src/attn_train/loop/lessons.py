"""What a loop learns from: batches, the loss of one, and how well the model does on what is kept for validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attn_models.decoder.mixture_of_experts import router_aux_loss
from attn_models.tokenizers import Tokenizer
from torch import Tensor, nn

from attn_train.loop.batches import Batches
from attn_train.loop.evaluation import mean_loss, next_token_loss
from attn_train.loop.seeds import derived
from attn_train.spec import TrainingSpec

if TYPE_CHECKING:
    from attn_train.loop.text import TextTokens

VALIDATION_SEED = 0x5EED
"""Validation batches are the same in every measurement of every run, so that losses can be compared."""

Done = Callable[[], None]
"""Called after each piece of a long measurement."""


class Lessons(Protocol):
    """Batches of one run. What is drawn depends on `generator` alone, so that a resumed run goes on with it."""

    generator: torch.Generator
    tokens: int
    """Tokens predicted since the run began or went on."""

    def draw(self) -> tuple[Tensor, ...]:
        """The tensors of a batch."""
        ...

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """What an update lowers, in nats a token."""
        ...

    def validation_loss(self, model: nn.Module, batches: int, done: Done) -> float | None:
        """The mean over `batches` batches kept for validation; None if there are none."""
        ...

    def final_values(self, model: nn.Module, done: Done) -> Mapping[str, float]:
        """What is measured once, when training is over, by name."""
        ...


class Material(Protocol):
    """Data that has been read, and perhaps cut into tokens."""

    @property
    def decided(self) -> Mapping[str, Any]:
        """The fields of a model's config that the data decide on."""
        ...

    @property
    def sizes(self) -> str:
        """How much there is, for people."""
        ...

    def lessons(self, spec: TrainingSpec) -> Lessons:
        """Fresh batches for a run."""
        ...

    def save(self, folder: Path, model: Any) -> Path:
        """Write the model with what is needed to use it; returns the folder."""
        ...


class TokenMaterial:
    """What data of tokens decide on and keep: the `tokenizer` that cut them."""

    tokenizer: Tokenizer

    @property
    def decided(self) -> Mapping[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self.tokenizer.vocabulary}

    def save(self, folder: Path, model: Any) -> Path:
        """A folder of a `LanguageModel` with its tokenizer."""
        from attn_models.loading import save_model

        return save_model(folder, model, self.tokenizer)


class TextLessons:
    """Windows of one long text; every token but the first is predicted from those before it."""

    def __init__(self, text: TextTokens, spec: TrainingSpec) -> None:
        self._text = text
        self._context, self._batch = spec.model.context, spec.optimizer.batch
        self._batches = Batches(
            text.training, context=self._context, batch=self._batch, seed=derived(spec.seed, "batches")
        )
        self.generator = self._batches.generator
        self.tokens = 0

    def draw(self) -> tuple[Tensor, ...]:
        """Inputs and targets, int64, [batch, context] each."""
        self.tokens += self._batch * self._context
        return self._batches.draw()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy, of later tokens too where the model predicts them, and what keeps experts busy."""
        own = getattr(model, "training_loss", None)
        loss: Tensor = next_token_loss(model, *batch) if own is None else own(*batch)
        return loss + router_aux_loss(model)

    def validation_loss(self, model: nn.Module, batches: int, done: Done) -> float | None:
        """The same over the text kept for validation; None if that is shorter than a window."""
        if len(self._text.validation) <= self._context:
            return None
        drawn = Batches(self._text.validation, context=self._context, batch=self._batch, seed=VALIDATION_SEED)
        return mean_loss(model, drawn, batches, done)

    def final_values(self, model: nn.Module, done: Done) -> Mapping[str, Any]:  # noqa: ARG002 -- the loss says all
        """Nothing more."""
        return {}
