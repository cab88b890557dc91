"""CLIP's image embeddings: preprocesses images as the folder specifies, runs the image tower, and saves both towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue, UserError
from torch import Tensor
from torch.nn.functional import normalize

from attn_models.adapters.base import require_allowed
from attn_models.adapters.clip import ClipAdapter, ClipImageLayout, clip_config
from attn_models.adapters.hf_config import refused_config
from attn_models.adapters.state_dict import (
    check_config_fits,
    init_empty_weights,
    read_parameters,
    stored_tensors,
)
from attn_models.device import resolve_device
from attn_models.encoder.clip import ClipImage, ClipText
from attn_models.tokenizers import Tokenizer
from attn_models.weights import Verify, read_folder, write_folder
from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json_object
from attn_models.weights.safetensors_files import require_floats

PREPROCESSOR = "preprocessor_config.json"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The mean and standard deviation of the pixels that CLIP was trained with, by channel."""
BICUBIC = 3
LARGEST_PIXELS = 100_000_000
"""The largest number of pixels of an image file that is read."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's formats that are read; others start external programs, or are not pictures."""
STEPS = {"do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}


def open_image(source: str | Path | bytes, name: str) -> Any:
    """Read an image file, given by its path or its bytes, as a Pillow image in RGB, rotated as its EXIF data specify.

    Raises `InvalidValue` for the field `name` if it is not an image or too large, `UserError` without Pillow.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise UserError('images need Pillow: pip install "attn-models[images]"') from error
    given = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            if image.width * image.height > LARGEST_PIXELS:
                raise InvalidValue.of(name, given, f"at most {LARGEST_PIXELS} pixels")
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise InvalidValue.of(name, given, f"an image file ({', '.join(FORMATS)})") from error
    except (OSError, Image.DecompressionBombError) as error:
        raise InvalidValue.of(name, given, f"an image file ({error})") from error


class ImageReader:
    """Preprocesses images for the image tower: resizes the shorter side to `side` pixels (bicubic), crops the centre,
    and normalises values from 0 to 1 by `mean` and `std` of each channel."""

    def __init__(self, side: int, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> None:
        self.side = side
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def read(self, paths: Sequence[str | Path]) -> Tensor:
        """Pixels [images, 3, side, side], float32, of image files.

        Raises `InvalidValue`, with the file's index, if one is not an image or too large; `UserError` without Pillow.
        """
        return torch.stack([self.pixels(open_image(path, f"images[{place}]")) for place, path in enumerate(paths)])

    def pixels(self, image: Any) -> Tensor:
        """Pixels [3, side, side] of a Pillow image in RGB."""
        import numpy as np
        from PIL import Image

        short, long = sorted(image.size)
        other = int(self.side * long / short)
        size = (self.side, other) if image.width <= image.height else (other, self.side)
        resized = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (resized.width - self.side) // 2, (resized.height - self.side) // 2
        cut = resized.crop((left, top, left + self.side, top + self.side))
        values = torch.from_numpy(np.asarray(cut, dtype=np.float32)).permute(2, 0, 1) / 255
        return (values - self.mean) / self.std


def read_preprocessor(folder: Path, side: int) -> ImageReader:
    """The reader that a folder's preprocessor_config.json describes, or CLIP's if there is none, for images of `side`
    pixels.

    Raises `CheckpointInvalid` for other preprocessing steps, sizes or resampling than `ImageReader` supports.
    """
    path = member(folder, PREPROCESSOR)
    if not path.is_file():
        return ImageReader(side)
    values = read_json_object(path, CONFIG_LIMIT)
    sizes = {"size": ({"shortest_edge": side}, side), "crop_size": ({"height": side, "width": side}, side)}
    fixed = {"resample": (BICUBIC,), "rescale_factor": (1 / 255,), **{name: (on,) for name, on in STEPS.items()}}
    try:
        require_allowed(values, {**sizes, **fixed})
        return ImageReader(side, channel_values(values, "image_mean", MEAN), channel_values(values, "image_std", STD))
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error


def channel_values(values: Mapping[str, Any], key: str, default: Sequence[float]) -> Sequence[float]:
    """The list of three numbers, one per channel, at `key`; raises `InvalidValue` for anything else."""
    given = values.get(key, default)
    if len(given) != 3 or not all(isinstance(value, float | int) for value in given):
        raise InvalidValue.of(key, given, "a list of three numbers, one for each channel")
    return [float(value) for value in given]


class ImageEncoder:
    """CLIP's image tower with its preprocessing. It computes vectors of length 1, to be compared with those of texts
    from `load_sentence_encoder` on the same folder; `scale` multiplies their cosine similarities before a softmax."""

    def __init__(self, model: ClipImage, reader: ImageReader, scale: float) -> None:
        self.model = model
        self.reader = reader
        self.scale = scale
        self.size = model.size

    @torch.inference_mode()
    def embed(self, images: Sequence[str | Path] | Tensor) -> Tensor:
        """Vectors [images, size] of image files, or of pixels [images, 3, side, side].

        Raises the errors of `ImageReader.read`, and `InvalidValue` for no images.
        """
        if isinstance(images, str | Path) or not len(images):
            raise InvalidValue.of("images", str(images), "at least one image, in a list")
        pixels = images if isinstance(images, Tensor) else self.reader.read(images)
        return normalize(self.model(pixels.to(self.model.begin)).float(), dim=-1)

    def probabilities(self, images: Tensor, texts: Tensor) -> Tensor:
        """The probability of each text for each image, [images, texts], from vectors of length 1 (section 2.3)."""
        return (self.scale * images @ texts.T).softmax(-1)


def load_image_encoder(
    folder: str | Path, dtype: str = "float32", *, verify: Verify = "hashes", device: str = "cpu"
) -> ImageEncoder:
    """The image tower in a CLIP folder, on `device`, in evaluation mode.

    Raises the errors of `load_image_classifier`, but `CheckpointInvalid` for another kind of model.
    """
    checkpoint = read_folder(folder, verify=verify, device=resolve_device(device))
    path, layout = checkpoint.path / "config.json", ClipImageLayout()
    if checkpoint.config.get("model_type") != layout.model_type:
        given = checkpoint.config.get("model_type")
        raise CheckpointInvalid.of(path, f"model_type {given!r} has no image encoder; allowed: {layout.model_type}")
    config = layout.from_hf_config(checkpoint.config, path)
    try:
        check_config_fits(checkpoint, config)
    except InvalidValue as error:
        raise refused_config(path, error, checkpoint.config, {}) from error
    with init_empty_weights():
        model = ClipImage(config)
    parameters = read_parameters(checkpoint, layout, model.state_dict(), getattr(torch, dtype))
    model.load_state_dict(parameters, assign=True)
    if "logit_scale" not in checkpoint.tensors.entries:
        raise CheckpointInvalid.of(checkpoint.path, "tensor 'logit_scale' is missing")
    shape = list(checkpoint.tensors.entries["logit_scale"].shape)
    if prod(shape) != 1:
        raise CheckpointInvalid.of(checkpoint.path, f"tensor 'logit_scale' has shape {shape}; needed: []")
    require_floats(checkpoint.path, checkpoint.tensors.entries, ["logit_scale"])
    scale = float(checkpoint.tensors["logit_scale"].exp())
    return ImageEncoder(model.eval(), read_preprocessor(checkpoint.path, config.image), scale)


def save_clip(folder: str | Path, text: ClipText, images: ImageEncoder, tokenizer: Tokenizer | None = None) -> Path:
    """Write both towers as one folder, which transformers can read too; raises the errors of `save_encoder`."""
    described = clip_config(text.config, images.model.config)
    described["dtype"] = str(text.embedding.weight.dtype).removeprefix("torch.")
    reader = images.reader
    settings = {
        **STEPS,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": reader.side},
        "crop_size": {"height": reader.side, "width": reader.side},
        "resample": BICUBIC,
        "rescale_factor": 1 / 255,
        "image_mean": reader.mean.flatten().tolist(),
        "image_std": reader.std.flatten().tolist(),
    }
    files: dict[str, Any] = {PREPROCESSOR: settings, **(tokenizer.files() if tokenizer else {})}
    tensors = stored_tensors(text.state_dict(), ClipAdapter())
    tensors |= stored_tensors(images.model.state_dict(), ClipImageLayout())
    return write_folder(folder, described, tensors | {"logit_scale": torch.tensor(images.scale).log()}, files)
