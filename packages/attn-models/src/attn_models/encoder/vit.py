"""The vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929, figure 1), and image classification with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from torch import Tensor, nn

from attn_models.decoder.layers import STANDARD, build_norm
from attn_models.encoder.config import VisionConfig
from attn_models.encoder.encoder import PreNormBlock
from attn_models.families.native import vit_adapter, vit_adapter_for
from attn_models.families.state_dict import check_config_fits, init_empty_weights, read_parameters, stored_tensors
from attn_models.families.vit import labels_of
from attn_models.weights import Verify, read_folder, write_folder


class VisionTransformer(nn.Module):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos; blocks; y = LN(z_L^0) W: patches are the words of an image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.begin = nn.Parameter(torch.empty(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, config.places, config.width))
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.layers))
        self.norm = build_norm(config.block)
        self.classifier = nn.Linear(config.width, config.classes)
        for weight in (self.begin, self.positions):
            nn.init.normal_(weight, std=STANDARD)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, channels, side, side], floating point.

        Raises `InvalidValue` for images of another shape than the model's.
        """
        side, channels = self.config.image, self.config.channels
        if images.dim() != 4 or images.shape[1:] != (channels, side, side):
            allowed = f"[batch, {channels}, {side}, {side}]"
            raise InvalidValue.of("images", f"the shape {list(images.shape)}", allowed)
        words = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.begin.expand(len(words), -1, -1), words], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.classifier(self.norm(hidden[:, 0]))
        return scores


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
        layout = vit_adapter_for(self.model.config)
        described = layout.describe(self.model.config, self.labels) | {"dtype": "float32"}
        return write_folder(folder, described, layout.headed(stored_tensors(self.model.state_dict(), layout)))


def load_image_classifier(folder: str | Path, dtype: str = "float32", *, verify: Verify = "hashes") -> ImageClassifier:
    """The classifier of a folder, on the CPU, in evaluation mode.

    Raises `CheckpointInvalid` for a folder that is damaged or does not fit the model, naming every tensor that is
    missing, extra or misshaped; `UnknownName` for another kind of model.
    """
    checkpoint = read_folder(folder, verify=verify)
    path = checkpoint.path / "config.json"
    layout = vit_adapter(checkpoint.config.get("model_type"))
    config = layout.configure(checkpoint.config, path)
    check_config_fits(checkpoint, config)
    with init_empty_weights():
        model = VisionTransformer(config)
    parameters = read_parameters(checkpoint, layout, model.state_dict(), getattr(torch, dtype))
    model.load_state_dict(parameters, assign=True)
    try:
        return ImageClassifier(model.eval(), labels_of(checkpoint.config))
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error
