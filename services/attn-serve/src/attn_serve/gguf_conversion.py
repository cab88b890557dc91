"""Conversion of GGUF files in a process of its own: torch, which it imports, would stay in the memory of a gateway."""

from __future__ import annotations

import atexit
import os
import shutil
from pathlib import Path

import msgspec
from attn_core.errors import AttnError, Unavailable
from attn_schema.child_process import Child, Parent

from attn_serve.replica_messages import SentError

EXIT_SECONDS = 5.0
_OUTSIDE: dict[tuple[Path, int], Path] = {}
"""Folders of this process outside of a home that is not writable, by file and time of its last change."""


class Conversion(msgspec.Struct, frozen=True):
    """What the process gets: the GGUF file, and the home below which its folder belongs."""

    file: str
    home: str


class Converted(msgspec.Struct, frozen=True):
    """What the process answers: the folder, or the error of the conversion."""

    folder: str = ""
    error: SentError | None = None


def folder_of_gguf(file: Path, home: Path) -> Path:
    """Like `attn_models.sources.gguf_files.folder_of_gguf`; raises `Unavailable` if the process dies."""
    known = file, file.stat().st_mtime_ns
    if known in _OUTSIDE:
        return _OUTSIDE[known]
    child = Child("attn_serve.gguf_conversion:main", {})
    child.send(Conversion(str(file), str(home)))
    found = next(child.messages(Converted), None)
    words = child.stop(EXIT_SECONDS)
    if found is None:
        raise Unavailable(f"the process that converted {file} {words}")
    if found.error:
        raise found.error.received()
    folder = Path(found.folder)
    if not folder.is_relative_to(home):
        _OUTSIDE[known] = folder
        atexit.register(shutil.rmtree, folder.parents[1], ignore_errors=True)
    return folder


def main() -> None:
    """The entry point of the process: convert the file of its `Conversion`."""
    parent = Parent()
    task = parent.task(Conversion)
    parent.follow(Conversion, lambda _: None)  # there is one; this process ends with its parent
    from attn_models.sources import gguf_files

    try:
        answer = Converted(str(gguf_files.folder_of_gguf(task.file, Path(task.home))))
    except AttnError as error:
        answer = Converted(error=SentError.of(error))
    parent.send(answer)
    os._exit(0)  # a folder outside of the home belongs to the parent now
