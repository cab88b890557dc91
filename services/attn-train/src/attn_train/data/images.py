"""Labelled images: the digits sample that is included, NumPy archives, and folders of image files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attn_core.errors import InvalidValue, MissingPackage
from attn_schema.text_files import files_of
from attn_schema.training import DataConfig
from numpy.typing import NDArray

from attn_train.data.synthetic import NUMBERS, digits
from attn_train.tasks.image_classification import ImageDataset, LabelledImages

Array = NDArray[Any]
MAX_BYTES = 4 << 30
"""Maximum size of a set of images, which is held in memory."""
NAMES = (("x", "y"), ("x_train", "y_train"))
TEST_NAMES = ("x_test", "y_test")
PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
FIELD = "data.dataset"


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of a .npz file by name; no pickled data is loaded.

    Raises `InvalidValue` for other files, for arrays of objects, and for more than `MAX_BYTES` bytes.
    """
    try:
        _require_small(path)
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InvalidValue.of(FIELD, str(path), "a .npz file with arrays x and y")
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue.of(FIELD, str(path), f"a .npz file that can be read without pickle ({error})") from error


def labelled_arrays(arrays: Mapping[str, Array], path: Path) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Return images, labels, and the pair of both for the test set if there is one.

    Raises `InvalidValue` if the arrays x and y, or x_train and y_train, are missing.
    """
    for images, labels in NAMES:
        if images in arrays and labels in arrays:
            test_set = tuple(arrays[name] for name in TEST_NAMES if name in arrays)
            return arrays[images], arrays[labels], test_set if len(test_set) == 2 else None
    allowed = "arrays x and y, or x_train, y_train, x_test and y_test"
    raise InvalidValue.of(FIELD, f"{path} with {', '.join(sorted(arrays)) or 'nothing'}", allowed)


def to_pixels(images: Array, path: Path) -> Array:
    """Convert images to uint8 [count, channels, side, side].

    The input is [count, pixels], [count, side, side] or [count, side, side, channels], as uint8 from 0 to 255 or as
    floats from 0 to 1. Raises `InvalidValue` for other shapes, images that are not square, and other values.
    """
    given = images.shape
    if images.ndim == 2 and (side := round(given[1] ** 0.5)) ** 2 == given[1]:
        images = images.reshape(given[0], side, side)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape or images.shape[1] != images.shape[2]:
        allowed = "square images: [count, side * side], [count, side, side] or [count, side, side, channels]"
        raise InvalidValue.of(FIELD, f"{path} with images of the shape {list(given)}", allowed)
    if images.dtype != np.uint8:
        if images.dtype.kind != "f" or not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
            allowed = "pixel values as uint8, or as floats from 0 to 1"
            raise InvalidValue.of(FIELD, f"{path} with {images.dtype} from {images.min()} to {images.max()}", allowed)
        images = np.round(images.astype(np.float64) * 255).astype(np.uint8)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def read_pictures(folder: Path) -> tuple[Array, list[str]]:
    """Read image files FOLDER/CLASS/FILE, in sorted order: pixels [count, height, width, channels] and class names.

    Raises `InvalidValue` for a file that cannot be read and for different sizes, `MissingPackage` without Pillow.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingPackage.of("attn-train[images]", "reading image files") from error
    files = picture_files(folder)
    found: list[Array] = []
    for file in files:
        try:
            with Image.open(file) as picture:
                grey = picture.mode in {"1", "L"}
                pixels = np.asarray(picture.convert("L" if grey else "RGB"))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError) as error:
            raise InvalidValue.of(FIELD, str(file), f"an image file that can be read ({error})") from error
        pixels = pixels[..., None] if grey else pixels
        if found and pixels.shape != found[0].shape:
            given = f"{file} with the shape {list(pixels.shape)}"
            raise InvalidValue.of(FIELD, given, f"the shape of the first image, {list(found[0].shape)}")
        if pixels.nbytes * len(files) > MAX_BYTES:
            given = f"{len(files)} images of {pixels.nbytes} bytes"
            raise InvalidValue.of(FIELD, given, f"at most {MAX_BYTES} bytes in all")
        found.append(pixels)
    return np.stack(found), [file.parent.name for file in files]


def picture_files(folder: Path) -> list[Path]:
    """Return the image files of a folder with a subfolder for each class; raises `InvalidValue` if there are none."""
    places = (place for place in folder.iterdir() if place.is_dir())
    files = sorted(file for place in places for file in files_of(place) if file.suffix.lower() in PICTURES)
    if not files:
        allowed = f"a folder with files CLASS/IMAGE of the types {', '.join(sorted(PICTURES))}"
        raise InvalidValue.of(FIELD, str(folder), allowed)
    return files


def _require_small(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise InvalidValue.of(FIELD, f"{path} with {size} bytes", f"at most {MAX_BYTES} bytes")
        for member in archive.infolist():
            with archive.open(member) as file:
                _require_fits(file, member.file_size, path)


def _require_fits(file: Any, size: int, path: Path) -> None:
    """Raise `InvalidValue` for an array header that claims more bytes than follow: NumPy would allocate them first."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed = int(np.prod([1, *map(int, shape)], dtype=object)) * dtype.itemsize
    if claimed > size:
        given = f"{path} with an array of {claimed} bytes, of which the file has {size}"
        raise InvalidValue.of(FIELD, given, "complete arrays")


DIGITS = "digits"
"""Handwritten digits of 8 x 8 pixels from 0 to 16."""
SHADES = 16
ORDER_SEED = 1
CLASSES = 100_000


def known_images() -> list[str]:
    """Return the names of the included sets of images."""
    return [DIGITS]


def load_images(config: DataConfig) -> ImageDataset:
    """Load the images of a config; validation images are the test set of the file, or else a fraction of all images.

    Raises `InvalidValue` for files that cannot be read, and for a test set with another image shape.
    """
    if config.name is not None:
        # Not shuffled: the last ones, used for validation, are by other writers.
        return _divided(*_digits(), config.validation_fraction)
    path = Path(config.path or "")
    if path.is_dir():
        pixels, classes = read_pictures(path)
        names = tuple(sorted(set(classes)))
        found = _images(pixels, np.array([names.index(name) for name in classes]), path)
        return _divided(_shuffled(found), names, config.validation_fraction)
    images, labels, test_set = labelled_arrays(read_arrays(path), path)
    training = _images(images, labels, path)
    if test_set is None:
        return _divided(_shuffled(training), _numbers(training), config.validation_fraction)
    validation = _images(*test_set, path)
    if validation.images.shape[1:] != training.images.shape[1:]:
        given = f"{path} with test images of the shape {list(validation.images.shape[1:])}"
        raise InvalidValue.of(
            "data.dataset", given, f"{list(training.images.shape[1:])}, the shape of the training images"
        )
    return ImageDataset(training, validation, _numbers(training, validation))


def _digits() -> tuple[LabelledImages, tuple[str, ...]]:
    known = digits()
    shades = torch.tensor([[[int(shade) for shade in row] for row in rows] for rows, _ in known])
    images = (shades * (255 / SHADES)).round().to(torch.uint8)[:, None]
    return LabelledImages(images, torch.tensor([NUMBERS.index(name) for _, name in known])), NUMBERS


def _images(pixels: Array, labels: Array, path: Path) -> LabelledImages:
    if labels.dtype.kind not in "iu" or labels.shape != (len(pixels),):
        given = f"{path} with {len(pixels)} images and labels {labels.dtype}{list(labels.shape)}"
        raise InvalidValue.of("data.dataset", given, "one integer label per image")
    if not 0 <= int(labels.min(initial=0)) <= int(labels.max(initial=0)) < CLASSES:
        given = f"{path} with labels from {labels.min()} to {labels.max()}"
        raise InvalidValue.of("data.dataset", given, f"labels from 0 to {CLASSES - 1}")
    return LabelledImages(torch.from_numpy(to_pixels(pixels, path)), torch.from_numpy(labels.astype(np.int64)))


def _numbers(*sets: LabelledImages) -> tuple[str, ...]:
    return tuple(str(number) for number in range(1 + max(int(found.labels.max()) for found in sets)))


def _shuffled(found: LabelledImages) -> LabelledImages:
    """Shuffle the images in a fixed order: files are often sorted by class."""
    order = torch.randperm(len(found.labels), generator=torch.Generator().manual_seed(ORDER_SEED))
    return LabelledImages(found.images[order], found.labels[order])


def _divided(found: LabelledImages, names: tuple[str, ...], validation: float) -> ImageDataset:
    kept = len(found.labels) - int(len(found.labels) * validation)
    training = LabelledImages(found.images[:kept], found.labels[:kept])
    return ImageDataset(training, LabelledImages(found.images[kept:], found.labels[kept:]), names)
