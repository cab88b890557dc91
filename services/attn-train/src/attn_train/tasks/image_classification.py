"""Image classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn import functional

from attn_train.tasks.base import VALIDATION_ROWS, VALIDATION_SEED, ExampleTask, OnBatch

WHITE = 255
AT_ONCE = 256
"""Batch size of evaluations."""


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Square `images`, uint8 [count, channels, side, side], and their class `labels`, int64 [count]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Training images, validation images, and the `names` of the classes."""

    training: LabelledImages
    validation: LabelledImages
    names: Sequence[str]

    @property
    def model_fields(self) -> dict[str, int]:
        """The image side in pixels, and the numbers of channels and of classes."""
        _, channels, side, _ = self.training.images.shape
        return {"image": side, "channels": channels, "classes": len(self.names)}

    @property
    def summary(self) -> str:
        """The number of images."""
        return f"{len(self.training.labels)} training and {len(self.validation.labels)} validation images"

    def task(self, config: TrainingConfig) -> ImageClassificationTask:
        """Return the training task."""
        return ImageClassificationTask(self, config)

    def save(self, folder: Path, model: Any) -> Path:
        """Save the model with the class names and the pixel normalisation, and return the folder."""
        from attn_models.loading.encoders import ImageClassifier

        return ImageClassifier(model, self.names).save(folder)


class ImageClassificationTask(ExampleTask):
    """Batches of images [batch, channels, side, side], from -1 (black) to 1 (white), and their classes [batch]."""

    def __init__(self, images: ImageDataset, config: TrainingConfig) -> None:
        super().__init__(config, [0] * len(images.training.labels))
        self._images = images

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return a batch of the next images."""
        found, chosen = self._images.training, torch.tensor(self._epochs.next_batch())
        self.tokens += self._batch
        return normalize_pixels(found.images[chosen]), found.labels[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy, in nats per image."""
        images, labels = batch
        return self.reinforce.loss(model, lambda: model(images)[:, None], labels[:, None], self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` batches of validation images, the same ones each time."""
        count = len(self._images.validation.labels)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(VALIDATION_SEED))
        chosen = order[: batches * VALIDATION_ROWS]
        found = self._images.validation
        kept = LabelledImages(found.images[chosen], found.labels[chosen])
        return classification_metrics(model, kept, on_batch).get("loss")

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the accuracy over all validation images."""
        found = classification_metrics(model, self._images.validation, on_batch)
        return {"accuracy": found["accuracy"]} if found else {}


def normalize_pixels(images: Tensor) -> Tensor:
    """Normalise pixels from 0..255 to float32 -1..1, as the authors of the Vision Transformer do."""
    return images.float() / (WHITE / 2) - 1


def classification_metrics(
    model: nn.Module, data: LabelledImages, on_batch: OnBatch = lambda: None
) -> dict[str, float]:
    """Return the mean "loss", in nats per image, and the "accuracy"; empty without images.

    The model's mode is restored.
    """
    if not len(data.labels):
        return {}
    training, device = model.training, next(model.parameters()).device
    model.eval()
    loss = correct = 0.0
    with torch.inference_mode():
        for start in range(0, len(data.labels), AT_ONCE):
            labels = data.labels[start : start + AT_ONCE].to(device)
            logits = model(normalize_pixels(data.images[start : start + AT_ONCE].to(device)))
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(-1) == labels).sum().item()
            on_batch()
    model.train(training)
    return {"loss": loss / len(data.labels), "accuracy": correct / len(data.labels)}
