"""Weights that replace those of a served model: a safetensors file that arrives in parts and stays in memory."""

from __future__ import annotations

import ctypes
import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_models.sources.gguf_files import folder_at
from attn_models.weights.manifest import MANIFEST_NAME
from attn_schema.methods import PART_BYTES
from safetensors import SafetensorError, safe_open

MEMORY = Path("/dev/shm")  # noqa: S108 -- a folder in it has a random name, and only its owner can read it
"""Files here are in memory, not on a disk."""
WEIGHTS = "model.safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of weights that stand for each other; they are converted to that in which the model is computed."""


class StagedWeights:
    """The weights of a model: those of the folder `base` or, once they are whole, those of a file in parts in `folder`,
    which is removed with this object."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folder: Path | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._size = 0

    def write(self, data: bytes, offset: int) -> None:
        """Append a part of the file; the offset 0 begins a new one. Raises `InvalidValue` for any other than the next
        part, and for a file that is far larger than the model's."""
        if offset == 0:
            self._place = tempfile.TemporaryDirectory(prefix="attn-weights-", dir=MEMORY if MEMORY.is_dir() else None)
            self._size = 0
        if self._place is None or offset != self._size:
            raise InvalidValue.of("offset", offset, f"{self._size}, where the part before ends, or 0 for a new file")
        self._size += len(data)
        most = 4 * sum(file.stat().st_size for file in _files(folder_at(self.base))) + 2**20
        if self._size > most:
            raise InvalidValue.of("data", f"{self._size} bytes", f"at most {most}, four times the model's file")
        with Path(self._place.name, WEIGHTS).open("ab") as file:
            file.write(data)

    def parts(self) -> Iterator[tuple[bytes, int]]:
        """Yield the parts of the file with their offsets, for other engines."""
        if self._place is not None:
            with Path(self._place.name, WEIGHTS).open("rb") as file:
                for offset in range(0, self._size, PART_BYTES):
                    yield file.read(PART_BYTES), offset

    def check(self) -> None:
        """Complete the folder; raises `CheckpointInvalid` unless the weights have the names, shapes and kinds of types
        of those in `base`."""
        base, place = folder_at(self.base), Path("" if self._place is None else self._place.name)
        try:
            given, known = described([place / WEIGHTS]), described(_files(base))
        except (SafetensorError, OSError) as error:
            raise CheckpointInvalid.of(WEIGHTS, f"not a safetensors file: {error}") from error
        wrong = sorted(name for name in given.keys() | known.keys() if given.get(name) != known.get(name))
        if wrong:
            name = wrong[0]
            text = f"{name} is {given.get(name, 'missing')}, the model has {known.get(name, 'no such weight')}"
            raise CheckpointInvalid.of(WEIGHTS, f"{text} ({len(wrong)} weights differ)")
        for file in base.iterdir():
            if file.is_file() and file.name != MANIFEST_NAME and ".safetensors" not in file.name:
                shutil.copy(file, place)
        self.folder = place


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def described(files: list[Path]) -> dict[str, str]:
    """The shape and kind of type of every tensor in safetensors files, by name."""
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                part = file.get_slice(name)
                kind = part.get_dtype()
                found[name] = f"{part.get_shape()} of {'floats' if kind in FLOATS else kind}"
    return found


def give_back_memory() -> None:
    """Return freed memory to the operating system, which allocators of C keep."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
