"""A text put together from several files."""

from __future__ import annotations

import os
from pathlib import Path

from attn_core.errors import CheckpointInvalid

from attn_models.weights.folder_swap import sync_path


def write_text_file(target: Path, parts: list[bytes]) -> None:
    """Write the texts `parts`, one after the other, to `target`, whole or not at all.

    Line ends become newlines. Raises CheckpointInvalid for a part that is not UTF-8, OSError for a failing disk.
    """
    try:
        text = "".join(part.decode("utf-8") for part in parts)
    except UnicodeDecodeError as error:
        raise CheckpointInvalid.of(target, f"a part of the text is not UTF-8: {error}") from error
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text.replace("\r\n", "\n"), encoding="utf-8", newline="\n")
        sync_path(partial)
        partial.replace(target)
        sync_path(target.parent)
    finally:
        partial.unlink(missing_ok=True)
