"""Image embeddings of CLIP, SigLIP and DINOv2: reads images as the folder says, runs the tower, and saves CLIP's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from attn_core.checks import require_whole
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UserError
from torch import Tensor
from torch.nn.functional import normalize

from attn_models.adapters.base import require_allowed
from attn_models.adapters.clip import ClipAdapter, ClipImageLayout, clip_config
from attn_models.adapters.hf_config import refused_config
from attn_models.adapters.image_towers import IMAGE_LAYOUTS
from attn_models.adapters.state_dict import (
    check_config_fits,
    init_empty_weights,
    read_parameters,
    stored_tensors,
)
from attn_models.device import resolve_device
from attn_models.encoder.clip import ClipImage, ClipText
from attn_models.encoder.config import ClipImageConfig, ImageEncoderConfig
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, Verify, read_folder, write_folder
from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_config, read_json_object
from attn_models.weights.safetensors_files import require_floats

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The mean and standard deviation of the pixels that CLIP was trained with, by channel."""
BICUBIC = 3
LARGEST_PIXELS = 100_000_000
"""The largest number of pixels of an image file that is read."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's formats that are read; others start external programs, or are not pictures."""
STEPS = {"do_resize": True, "do_center_crop": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
OPEN = {"do_center_crop": (False, None), "do_convert_rgb": (None,)}
"""Further values of steps: an image is cropped or not, and always read as RGB."""


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
    """Preprocesses images for the image tower: resizes the shorter side to `shortest` pixels (bicubic), crops the
    centre of `side` pixels, and normalises values from 0 to 1 by `mean` and `std` of each channel. Without `shortest`,
    both sides are resized to `side` pixels."""

    def __init__(
        self, side: int, mean: Sequence[float] = MEAN, std: Sequence[float] = STD, *, shortest: int | None = None
    ) -> None:
        self.side = side
        self.shortest = shortest
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
        near = self.side if self.shortest is None else self.shortest
        other = near if self.shortest is None else int(near * long / short)
        size = (near, other) if image.width <= image.height else (other, near)
        resized = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (resized.width - self.side) // 2, (resized.height - self.side) // 2
        cut = resized.crop((left, top, left + self.side, top + self.side))
        values = torch.from_numpy(np.asarray(cut, dtype=np.float32)).permute(2, 0, 1) / 255
        return (values - self.mean) / self.std


def image_settings(folder: Path) -> tuple[Path, Any]:
    """The file of a folder that describes how images are read, and its settings; None where there is no such file."""
    path = member(folder, PREPROCESSOR)
    if path.is_file():
        return path, read_json_object(path, CONFIG_LIMIT)
    path = member(folder, PROCESSOR)
    return path, read_json_object(path, CONFIG_LIMIT).get("image_processor", {}) if path.is_file() else None


def processor_files(folder: Path) -> dict[str, Any]:
    """The contents of the files of a model folder that describe how images are read, by name."""
    paths = [member(folder, name) for name in (PREPROCESSOR, PROCESSOR)]
    return {path.name: read_config(path) for path in paths if path.is_file()}


def read_preprocessor(folder: Path, config: ImageEncoderConfig) -> ImageReader:
    """The reader that a folder's preprocessor_config.json describes, or CLIP's for a CLIP folder without one.

    Raises `CheckpointInvalid` for other preprocessing steps, sizes or resampling than `ImageReader` supports.
    """
    path, values = image_settings(folder)
    if values is None and isinstance(config, ClipImageConfig):
        return ImageReader(config.image, shortest=config.image)
    try:
        if not isinstance(values, Mapping):
            raise InvalidValue.of(PREPROCESSOR, values, "the settings of an image processor")
        return _reader_of(values, config)
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error


def _reader_of(values: Mapping[str, Any], config: ImageEncoderConfig) -> ImageReader:
    fixed = {step: (on, *OPEN.get(step, ())) for step, on in STEPS.items()}
    require_allowed(values, {"resample": (BICUBIC,), "rescale_factor": (1 / 255,), **fixed})
    pixels = channel_values(values, "image_mean", MEAN), channel_values(values, "image_std", STD)
    if not values.get("do_center_crop", config.class_token):
        require_allowed(values, {"size": (square(config.image),)})
        return ImageReader(config.image, *pixels)
    crop = values.get("crop_size", config.image)
    side = crop["height"] if isinstance(crop, Mapping) and crop.keys() == {"height", "width"} else crop
    size = values.get("size", side)
    shortest = size["shortest_edge"] if isinstance(size, Mapping) and size.keys() == {"shortest_edge"} else size
    require_whole("crop_size", side, ge=config.patch, unit="pixels")
    require_whole("size", shortest, ge=side, unit="pixels")
    if isinstance(crop, Mapping) and crop != square(side):
        raise InvalidValue.of("crop_size", crop, "a square")
    if not config.interpolate:
        require_allowed({"size": shortest, "crop_size": side}, dict.fromkeys(("size", "crop_size"), (config.image,)))
    return ImageReader(side, *pixels, shortest=shortest)


def square(side: int) -> dict[str, int]:
    """A square image's size, as preprocessor_config.json writes it."""
    return {"height": side, "width": side}


def channel_values(values: Mapping[str, Any], key: str, default: Sequence[float]) -> Sequence[float]:
    """The list of three numbers, one per channel, at `key`; raises `InvalidValue` for anything else."""
    given = values.get(key, default)
    if len(given) != 3 or not all(isinstance(value, float | int) for value in given):
        raise InvalidValue.of(key, given, "a list of three numbers, one for each channel")
    return [float(value) for value in given]


class ImageEncoder:
    """An image tower with its preprocessing. It computes vectors of length 1, to be compared with those of texts from
    `load_sentence_encoder` on the same folder, if it has a text tower; `scale` multiplies their cosine similarities
    before a softmax or, with `bias`, which is added to them, a sigmoid (SigLIP)."""

    def __init__(self, model: ClipImage, reader: ImageReader, scale: float | None, bias: float | None = None) -> None:
        self.model = model
        self.reader = reader
        self.scale = scale
        self.bias = bias
        self.size = model.size

    @torch.inference_mode()
    def embed(self, images: Sequence[str | Path] | Tensor) -> Tensor:
        """Vectors [images, size] of image files, or of pixels [images, 3, side, side].

        Raises the errors of `ImageReader.read`, and `InvalidValue` for no images.
        """
        if isinstance(images, str | Path) or not len(images):
            raise InvalidValue.of("images", str(images), "at least one image, in a list")
        pixels = images if isinstance(images, Tensor) else self.reader.read(images)
        return normalize(self.model(pixels.to(self.model.patches.weight)).float(), dim=-1)

    def probabilities(self, images: Tensor, texts: Tensor) -> Tensor:
        """The probability of each text for each image, [images, texts], from vectors of length 1: of one among the
        texts (CLIP, section 2.3), or of each alone (SigLIP). Raises `Incompatible` for a model without texts."""
        if self.scale is None:
            raise Incompatible("probabilities are those of texts, for which this model has no tower")
        scores = self.scale * images @ texts.T
        return scores.softmax(-1) if self.bias is None else (scores + self.bias).sigmoid()


def load_image_encoder(
    folder: str | Path, dtype: str = "float32", *, verify: Verify = "hashes", device: str = "cpu"
) -> ImageEncoder:
    """The image tower in a folder of CLIP, SigLIP or DINOv2, on `device`, in evaluation mode.

    Raises the errors of `load_image_classifier`, but `CheckpointInvalid` for another kind of model.
    """
    checkpoint = read_folder(folder, verify=verify, device=resolve_device(device))
    path, given = checkpoint.path / "config.json", checkpoint.config.get("model_type")
    layout = IMAGE_LAYOUTS.get(str(given))
    if layout is None:
        allowed = ", ".join(IMAGE_LAYOUTS)
        raise CheckpointInvalid.of(path, f"model_type {given!r} has no image encoder; allowed: {allowed}")
    config = layout.from_hf_config(checkpoint.config, path)
    try:
        check_config_fits(checkpoint, config)
    except InvalidValue as error:
        raise refused_config(path, error, checkpoint.config, {}) from error
    with init_empty_weights():
        model = ClipImage(config)
    parameters = read_parameters(checkpoint, layout.layout(config), model.state_dict(), getattr(torch, dtype))
    model.load_state_dict(parameters, assign=True)
    scale, bias = (read_number(checkpoint, name) if name in layout.similarity else None for name in SIMILARITY)
    reader = read_preprocessor(checkpoint.path, config)
    return ImageEncoder(model.eval(), reader, None if scale is None else math.exp(scale), bias)


SIMILARITY = ("logit_scale", "logit_bias")
"""The tensors of one number by which similarities of images and texts become scores."""


def read_number(checkpoint: CheckpointFolder, name: str) -> float:
    """The number in a tensor; raises `CheckpointInvalid` if it is missing or holds something else."""
    entry = checkpoint.tensors.entries.get(name)
    if entry is None:
        raise CheckpointInvalid.of(checkpoint.path, f"tensor {name!r} is missing")
    if math.prod(entry.shape) != 1:
        raise CheckpointInvalid.of(checkpoint.path, f"tensor {name!r} has shape {list(entry.shape)}; needed: []")
    require_floats(checkpoint.path, checkpoint.tensors.entries, [name])
    return float(checkpoint.tensors[name])


def save_clip(folder: str | Path, text: ClipText, images: ImageEncoder, tokenizer: Tokenizer | None = None) -> Path:
    """Write both towers as one folder, which transformers can read too; raises the errors of `save_encoder`."""
    if not isinstance(images.model.config, ClipImageConfig):
        raise Incompatible("only the towers of CLIP are written")
    described = clip_config(text.config, images.model.config)
    described["dtype"] = str(text.embedding.weight.dtype).removeprefix("torch.")
    reader = images.reader
    settings = {
        **STEPS,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": reader.side},
        "crop_size": square(reader.side),
        "resample": BICUBIC,
        "rescale_factor": 1 / 255,
        "image_mean": reader.mean.flatten().tolist(),
        "image_std": reader.std.flatten().tolist(),
    }
    files: dict[str, Any] = {PREPROCESSOR: settings, **(tokenizer.files() if tokenizer else {})}
    tensors = stored_tensors(text.state_dict(), ClipAdapter())
    tensors |= stored_tensors(images.model.state_dict(), ClipImageLayout())
    return write_folder(folder, described, tensors | {"logit_scale": torch.tensor(images.scale or 1.0).log()}, files)
