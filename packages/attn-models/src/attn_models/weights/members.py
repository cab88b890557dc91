"""Which files of a checkpoint folder may be opened at all."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import CheckpointInvalid

UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pt2", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".distcp", ".metadata")
"""Names under which weights are kept in formats that run code while they are read."""

_PICKLE_PROTOCOLS = tuple(bytes([0x80, protocol]) for protocol in range(1, 6))
_ZIP_MAGIC = b"PK\x03\x04"


def member(folder: Path, name: str) -> Path:
    """The path of the file `name` directly inside `folder`; the file need not exist.

    Raises CheckpointInvalid for a name with a directory in it and for a link that leaves the folder.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointInvalid.of(folder, f"{name!r} is not the name of a file directly in the folder")
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointInvalid.of(path, "is a symbolic link that leaves the checkpoint folder")
    return path


def code_format(path: Path) -> str | None:
    """What makes the content of `path` a format that runs code (`pickle`, `zip archive`), or None.

    Decided by the first bytes, never by the name: a renamed file is recognised.
    """
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith(_ZIP_MAGIC):
        return "a zip archive (torch.save's format, which holds a pickle)"
    # A safetensors file can begin with the same two bytes, as its header's length, but has a brace at byte 8.
    if start.startswith(_PICKLE_PROTOCOLS) and start[8:] != b"{":
        return "a pickle"
    return None


def refuse_code_format(path: Path) -> None:
    """Raises CheckpointInvalid when the file at `path` is a pickle or a zip archive, whatever its name."""
    found = code_format(path)
    if found is not None:
        rule = f"is {found}, which could run code when read; convert it to safetensors where it came from"
        raise CheckpointInvalid.of(path, rule)


def refuse_folder_without_weights(folder: Path) -> None:
    """Always raises CheckpointInvalid: the folder has no safetensors; names an unsafe file found instead."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(UNSAFE_SUFFIXES) and path.is_file():
            refuse_code_format(path)
            raise CheckpointInvalid.of(path, "weights are read from safetensors only, whatever else is in the folder")
    raise CheckpointInvalid.of(folder, "no model.safetensors and no model.safetensors.index.json")
