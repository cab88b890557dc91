"""The images that a specification names: digits that come along, or those of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from attn_core.errors import InvalidValue

from attn_train.captions import NUMBERS, digits
from attn_train.image_files import Array, arrays_of, labelled, pictures_of, squares
from attn_train.loop.images import Images, ImageSet
from attn_train.spec import DataSpec

DIGITS = "digits"
"""Handwritten digits of 8 x 8 shades from 0 to 16."""
SHADES = 16
ORDER_SEED = 1
CLASSES = 100_000


def known_images() -> list[str]:
    """The sets of images known by name."""
    return [DIGITS]


def load_images(spec: DataSpec) -> Images:
    """The images; those kept for validation are a test set of their own, or else some of all.

    Raises `InvalidValue` for what cannot be read, and for images that do not belong together.
    """
    if spec.name is not None:
        # As they come: the last ones are of other writers.
        return _divided(*_digits(), spec.validation)
    path = Path(spec.path or "")
    if path.is_dir():
        pixels, kinds = pictures_of(path)
        names = tuple(sorted(set(kinds)))
        found = _images(pixels, np.array([names.index(kind) for kind in kinds]), path)
        return _divided(_shuffled(found), names, spec.validation)
    shades, labels, held = labelled(arrays_of(path), path)
    training = _images(shades, labels, path)
    if held is None:
        return _divided(_shuffled(training), _numbers(training), spec.validation)
    validation = _images(*held, path)
    if validation.images.shape[1:] != training.images.shape[1:]:
        given = f"{path} with tests of the shape {list(validation.images.shape[1:])}"
        raise InvalidValue.of("data.path", given, f"{list(training.images.shape[1:])}, as those to train on")
    return Images(training, validation, _numbers(training, validation))


def _digits() -> tuple[ImageSet, tuple[str, ...]]:
    known = digits()
    shades = torch.tensor([[[int(shade) for shade in row] for row in rows] for rows, _ in known])
    images = (shades * (255 / SHADES)).round().to(torch.uint8)[:, None]
    return ImageSet(images, torch.tensor([NUMBERS.index(name) for _, name in known])), NUMBERS


def _images(pixels: Array, labels: Array, path: Path) -> ImageSet:
    if labels.dtype.kind not in "iu" or labels.shape != (len(pixels),):
        given = f"{path} with {len(pixels)} images and labels {labels.dtype}{list(labels.shape)}"
        raise InvalidValue.of("data.path", given, "a whole number for each image")
    if not 0 <= int(labels.min(initial=0)) <= int(labels.max(initial=0)) < CLASSES:
        raise InvalidValue.of("data.path", f"{path} with labels {labels.min()} to {labels.max()}", "0 to few")
    return ImageSet(torch.from_numpy(squares(pixels, path)), torch.from_numpy(labels.astype(np.int64)))


def _numbers(*sets: ImageSet) -> tuple[str, ...]:
    return tuple(str(number) for number in range(1 + max(int(found.labels.max()) for found in sets)))


def _shuffled(found: ImageSet) -> ImageSet:
    """In another order, the same each time: files are often sorted by what they show."""
    order = torch.randperm(len(found.labels), generator=torch.Generator().manual_seed(ORDER_SEED))
    return ImageSet(found.images[order], found.labels[order])


def _divided(found: ImageSet, names: tuple[str, ...], validation: float) -> Images:
    kept = len(found.labels) - int(len(found.labels) * validation)
    training = ImageSet(found.images[:kept], found.labels[:kept])
    return Images(training, ImageSet(found.images[kept:], found.labels[kept:]), names)
