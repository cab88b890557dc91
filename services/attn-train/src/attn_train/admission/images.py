"""Checks of the images to train on."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName

from attn_train.admission.text import check_path, require_inside, roots_of
from attn_train.image_data import known_images
from attn_train.image_files import pictures_in
from attn_train.loop.text import CHARACTER
from attn_train.settings import TrainSettings
from attn_train.spec import DataSpec

FIELD = "spec.data.path"


def check_images(data: DataSpec, *, home: Path, settings: TrainSettings, local: bool) -> None:
    """Raises the error of the first thing that would keep the images from being found."""
    if data.tokenizer != CHARACTER:
        raise InvalidValue.of("spec.data.tokenizer", data.tokenizer, "none, as images have no text")
    if data.name is not None:
        if data.name not in known_images():
            raise UnknownName.of("set of images", data.name, known_images())
        return
    path, roots = Path(data.path or ""), roots_of(home, settings, local=local)
    if not path.is_absolute():
        raise InvalidValue.of(FIELD, str(path), "an absolute path on the server")
    require_inside(path, FIELD, roots)
    if path.is_dir():
        pictures_in(path)
    else:
        check_path(path, roots=roots)
