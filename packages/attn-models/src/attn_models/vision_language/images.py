"""Image preprocessing for SmolVLM: each image becomes tiles of a larger copy, and the whole image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from torch import Tensor

from attn_models.adapters.base import require_allowed, required_count
from attn_models.loading.images import channel_values, image_settings, open_image

LANCZOS = 1
LONGEST_EDGE = 4096
"""The largest side in pixels that images are resized to, whatever the settings say."""
STEPS = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_pad", "do_convert_rgb"), (True, None))
UNUSED = {"image_processor_type", "processor_class", "feature_extractor_type", "video_sampling", "data_format"} | {
    "return_row_col_info",
    "input_data_format",
    "image_seq_len",
}
READ = {"size", "max_image_size", "image_mean", "image_std", "do_image_splitting", "resample", "rescale_factor"}


@dataclass(frozen=True)
class Tiles:
    """The tiles of an image: `pixels` [rows * columns + 1, 3, side, side], float32, row by row, and last the whole
    image. For an image that is not split, the whole image only, with `rows` and `columns` 0."""

    pixels: Tensor
    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class TileReader:
    """Resizes the longer side of an image to `longest_edge` pixels, both sides to multiples of `side`, and splits it
    into tiles (Laurençon et al. 2024, arXiv 2408.12637, section 3.2); without `split` there is only the whole image.
    Pixels from 0 to 1 are normalised by `mean` and `std`."""

    side: int
    longest_edge: int
    split: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of tiles of an image of this size in pixels; 0 and 0 if it is not split."""
        wide, high = self._multiples(*_bounded(*_longest(width, height, self.longest_edge)))
        rows, columns = high // self.side, wide // self.side
        return (rows, columns) if self.split and rows * columns > 1 else (0, 0)

    def read(self, source: bytes | Path, name: str = "image") -> Tiles:
        """The tiles of an image file, given by its bytes or its path; raises `InvalidValue` for the field `name` if it
        is not an image or too large."""
        image = open_image(source, name)
        width, height = image.size
        rows, columns = self.grid(width, height)
        image = _resized(image, _bounded(*_longest(width, height, self.longest_edge)))
        if not rows:
            return Tiles(self._pixels([_resized(image, (self.side, self.side))]), 0, 0)
        image = _resized(image, (columns * self.side, rows * self.side))
        corners = [(column * self.side, row * self.side) for row in range(rows) for column in range(columns)]
        cut = [image.crop((left, top, left + self.side, top + self.side)) for left, top in corners]
        return Tiles(self._pixels([*cut, _resized(image, (self.side, self.side))]), rows, columns)

    def _multiples(self, width: int, height: int) -> tuple[int, int]:
        """Both sides rounded up to multiples of a tile's, the shorter one in proportion to the rounded longer one."""

        def up(length: int) -> int:
            return math.ceil(length / self.side) * self.side

        ratio = width / height
        if width >= height:
            wide = up(width)
            return wide, up(int(wide / ratio))
        high = up(height)
        return up(int(high * ratio)), high

    def _pixels(self, images: list[Any]) -> Tensor:
        import numpy as np

        values = torch.stack([torch.from_numpy(np.asarray(image, dtype=np.float32)) for image in images])
        mean, std = (torch.tensor(given)[:, None, None] for given in (self.mean, self.std))
        return (values.permute(0, 3, 1, 2) / 255 - mean) / std


def read_tile_reader(folder: Path, side: int) -> TileReader:
    """The reader for a model folder, from its preprocessor_config.json or `image_processor` in processor_config.json,
    with transformers' defaults; the tower's input images have sides of `side` pixels.

    Raises `CheckpointInvalid` for an unknown or unsupported setting.
    """
    path, values = image_settings(folder)
    if values is None:
        return TileReader(side=side, longest_edge=4 * side)
    try:
        if not isinstance(values, Mapping):
            raise InvalidValue.of("image_processor", values, "an object")
        return _reader_of(values, side)
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error


def _reader_of(values: Mapping[str, Any], side: int) -> TileReader:
    unknown = sorted({name for name, value in values.items() if value is not None} - READ - UNUSED - STEPS.keys())
    if unknown:
        raise InvalidValue(f"unknown settings of an image processor: {', '.join(unknown)}", field=unknown[0])
    supported = {"resample": (LANCZOS, None), "do_image_splitting": (True, False, None)}
    require_allowed(values, {**STEPS, **supported, "max_image_size": ({"longest_edge": side}, None)})
    factor = values.get("rescale_factor")
    if factor is not None and not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise InvalidValue.of("rescale_factor", factor, "1 / 255")
    size = values.get("size") or {"longest_edge": 4 * side}
    if not isinstance(size, Mapping) or set(size) != {"longest_edge"}:
        raise InvalidValue.of("size", size, "an object with longest_edge only")
    return TileReader(
        side=side,
        longest_edge=required_count(size, "longest_edge"),
        split=values.get("do_image_splitting") is not False,
        mean=tuple(channel_values(values, "image_mean", TileReader.mean)),
        std=tuple(channel_values(values, "image_std", TileReader.std)),
    )


def _longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with the longer side equal to `longest` and the shorter one in proportion, made even."""
    ratio = width / height
    short = int(longest / ratio) if width >= height else int(longest * ratio)
    short = max(1, short + short % 2)
    return (longest, short) if width >= height else (short, longest)


def _bounded(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > LONGEST_EDGE:
        width, height = LONGEST_EDGE, int(LONGEST_EDGE / ratio)
    elif height > width and height > LONGEST_EDGE:
        width, height = int(LONGEST_EDGE * ratio), LONGEST_EDGE
    return max(width, 1), max(height, 1)


def _resized(image: Any, size: tuple[int, int]) -> Any:
    from PIL import Image

    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
