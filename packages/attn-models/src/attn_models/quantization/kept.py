"""The folder beside a model in which kernels keep its packed weights."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attn_core.kernels.linear import KEPT, KeptWeights
from attn_schema.home import home_folder

from attn_models.weights.manifest import read_manifest
from attn_models.weights.safetensors_files import LazyTensors

FOLDER = ".packed"
"""The folder within a model's folder; below it is one for each content."""
CHECKED = "finite"
"""A file that says that all weights of this content were read, and none is NaN or infinite."""


def kept_folder(folder: Path) -> Path | None:
    """The folder for the packed weights of a model; None for one outside of attn's home, whose folders are left as they
    are, and for one without a manifest.

    It is named after the hashes of the manifest, and the sizes and times of change of the files that these describe.
    """
    records = read_manifest(folder) if home_folder().resolve() in folder.resolve().parents else None
    if records is None:
        return None
    digest = hashlib.sha256(repr(sorted(records.items())).encode())
    for path in sorted(folder.glob("*.safetensors")):
        at = path.stat()
        digest.update(f"{path.name} {at.st_ino} {at.st_size} {at.st_mtime_ns}".encode())
    return folder / FOLDER / digest.hexdigest()[:32]


def is_checked(place: Path | None) -> bool:
    """Whether no weight of the content that `place` belongs to is NaN or infinite, as an earlier call has found."""
    return place is not None and (place / CHECKED).exists()


@contextmanager
def keeping_weights(place: Path | None, tensors: LazyTensors) -> Iterator[None]:
    """Let kernels keep what they pack of these tensors in `place`, instead of what was kept of another content."""
    if place is None:
        yield
        return
    token = KEPT.set(KeptWeights(place, tensors.addresses))
    try:
        yield
    finally:
        KEPT.reset(token)
    with suppress(OSError):  # where nothing can be kept, kernels say so
        place.mkdir(parents=True, exist_ok=True)
        (place / CHECKED).touch()
        for other in place.parent.iterdir():
            if other != place:
                shutil.rmtree(other, ignore_errors=True)
