"""Packed weights in files beside a model, so that it is opened again without packing them, and processes share them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from attn_core.kernels.linear import KEPT
from torch import Tensor

from attn_kernels_cpu.compiling import source_hash
from attn_kernels_cpu.library import loaded

log = logging.getLogger(__name__)

_TO_DISK = ThreadPoolExecutor(1)
"""Waits for the disk; a process that ends waits for it."""


class KeptFile:
    """The file with the packed weights of one layer.

    It is named after the instruction set, the sources of the kernels, the layout, and the names of the matrices in the
    model's files, for whose content its folder stands.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, form: str, parts: Sequence[Tensor], bias: Tensor | None) -> KeptFile | None:
        """The file for these matrices in the layout `form`; None if nothing may be kept, or one is not as in a file."""
        kept = KEPT.get()
        names = [None if kept is None else kept.stored.get(part.data_ptr()) for part in parts]
        if kept is None or None in names:
            return None
        digest = hashlib.sha256(repr((form, names, [tuple(part.shape) for part in parts])).encode())
        if bias is not None:
            digest.update(bias.detach().float().numpy().tobytes())
        return cls(kept.folder / f"{loaded().isa.name}-{source_hash()}" / digest.hexdigest()[:32])

    def read(self, size: int) -> Tensor | None:
        """The content [size], uint8, mapped; None if the file does not exist, or has another size."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == size:
                return torch.frombuffer(mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        return None

    def write(self, content: Tensor) -> None:
        """Write the file, in the background; it appears once it is on the disk, unless another process has made it.

        That the file system is read-only or full, or has no files without names, is logged once.
        """
        _TO_DISK.submit(self._write, content)

    def _write(self, content: Tensor) -> None:
        folder = self._path.parent
        try:
            if not folder.exists():
                for older in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
                    shutil.rmtree(older, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600), "wb") as file:
                file.write(content.numpy().data)
                file.flush()
                os.fsync(file.fileno())
                # Only with a folder's descriptor does Python follow the link.
                os.link(f"/proc/self/fd/{file.fileno()}", self._path, src_dir_fd=file.fileno())
        except FileExistsError:
            pass
        except (OSError, AttributeError) as error:  # systems other than Linux lack these files
            _say_once(folder.parent, str(error))


@cache
def _say_once(folder: Path, why: str) -> None:
    log.warning("packed weights are not kept in %s, so each start packs them again: %s", folder, why)
