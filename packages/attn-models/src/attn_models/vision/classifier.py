"""A vision Transformer from a folder, and into one, with the names of what it tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from torch import Tensor

from attn_models.decoder.weightless import weightless
from attn_models.families.built import refuse_giants
from attn_models.families.own_vit import layout_for, vit_layout_of
from attn_models.families.tensors import read_parameters, stored_tensors
from attn_models.families.vit import labels_of
from attn_models.vision.vit import VisionTransformer
from attn_models.weights import Verify, read_folder, write_folder


class ImageClassifier:
    """A model and a label for each of its classes; raises `InvalidValue` for another number of labels."""

    def __init__(self, model: VisionTransformer, labels: Sequence[str]) -> None:
        if len(labels) != model.config.classes or len(set(labels)) < len(labels):
            raise InvalidValue.of("labels", list(labels), f"{model.config.classes} different ones")
        self.model = model
        self.labels = tuple(labels)

    @torch.inference_mode()
    def classify(self, images: Tensor) -> list[dict[str, float]]:
        """The probability of each label, for each of the images [batch, channels, side, side], normed as in training.

        Raises `InvalidValue` for images of another shape.
        """
        rows = self.model(images.to(self.model.begin.dtype)).softmax(-1).tolist()
        return [dict(zip(self.labels, row, strict=True)) for row in rows]

    def save(self, folder: Path) -> Path:
        """Write the folder, which transformers reads too where it has words for the attention; returns it."""
        layout = layout_for(self.model.config)
        described = layout.describe(self.model.config, self.labels) | {"dtype": "float32"}
        return write_folder(folder, described, layout.headed(stored_tensors(self.model.state_dict(), layout)))


def load_image_classifier(folder: str | Path, dtype: str = "float32", *, verify: Verify = "hashes") -> ImageClassifier:
    """The classifier of a folder, on the CPU, in evaluation mode.

    Raises `CheckpointInvalid` for a folder that is damaged or does not fit the model, naming every tensor that is
    missing, extra or misshaped; `UnknownName` for another kind of model.
    """
    checkpoint = read_folder(folder, verify=verify)
    path = checkpoint.path / "config.json"
    layout = vit_layout_of(checkpoint.config.get("model_type"))
    config = layout.configure(checkpoint.config, path)
    refuse_giants(checkpoint, config)
    with weightless():
        model = VisionTransformer(config)
    parameters = read_parameters(checkpoint, layout, model.state_dict(), getattr(torch, dtype))
    model.load_state_dict(parameters, assign=True)
    try:
        return ImageClassifier(model.eval(), labels_of(checkpoint.config))
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error
