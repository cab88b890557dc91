"""The manifest of a finished checkpoint folder: the SHA-256 and size of every file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed

from attn_models.weights.safe_files import member, read_json_object

MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 4 << 20
TRAINING = "training"
"""The entry of `source` with the facts of the job that trained the model, by name, which model cards show."""

SAMPLED_BYTES, SAMPLES = 64 << 20, 256
"""The most bytes of a file that `fingerprint` reads, and the number of blocks in which it does."""
READ = frozenset({".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja"})
"""The endings of the files of a folder from which models and tokenizers are read."""

Verify = Literal["hashes", "sizes"]
"""How a manifest is checked: every byte hashed (about 0.4 GB/s per core), or only names and sizes."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a manifest: hexadecimal SHA-256 and size in bytes."""

    sha256: str
    size: int


def file_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(folder: Path) -> str:
    """A text that changes with the content of a model's or an adapter's folder, or of a GGUF file, and is equal for a
    copy of it on another machine; empty if there is none.

    Of a file of more than `SAMPLED_BYTES` bytes only evenly spaced blocks are read: weights that were trained or
    converted anew differ in all of them, and the hashes of a manifest count in any case.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.glob("*") if path.suffix in READ)
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        step = max(SAMPLED_BYTES // SAMPLES, size // SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(SAMPLED_BYTES // SAMPLES))
    return digest.hexdigest() if files else ""


def write_manifest(folder: Path, source: Mapping[str, Any] | None = None) -> Path:
    """Write the manifest of every file in `folder`; `source` describes the origin of the checkpoint."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_NAME)
    hashes = _hashes([folder / name for name in names])
    files = {name: {"sha256": hashes[folder / name], "size": (folder / name).stat().st_size} for name in names}
    manifest = folder / MANIFEST_NAME
    content = {"format": 1, **({"source": dict(source)} if source else {}), "files": files}
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return manifest


def record_source(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts about the origin of a finished folder to its manifest, which no other program reads.

    Raises CheckpointInvalid for a malformed manifest, CheckpointWriteFailed when the file system fails.
    """
    path = folder / MANIFEST_NAME
    content = read_json_object(path, MANIFEST_LIMIT)
    content["source"] = {**content.get("source", {}), **facts}
    stage = path.with_name(f".{MANIFEST_NAME}.{os.getpid()}")
    try:
        stage.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        stage.replace(path)
    except OSError as error:
        raise CheckpointWriteFailed.of(path, error) from error


def read_source(folder: Path) -> dict[str, Any]:
    """What the manifest of a folder says about the origin of the model; empty without a manifest."""
    path = member(folder, MANIFEST_NAME)
    found = read_json_object(path, MANIFEST_LIMIT).get("source") if path.is_file() else None
    return found if isinstance(found, dict) else {}


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """The records of the folder's manifest by file name; None when there is no manifest.

    Raises CheckpointInvalid when the manifest is malformed.
    """
    path = member(folder, MANIFEST_NAME)
    if not path.exists():
        return None
    files = read_json_object(path, MANIFEST_LIMIT).get("files")
    if not isinstance(files, dict):
        raise CheckpointInvalid.of(path, "a manifest needs an object 'files'")
    return {name: _record(path, name, entry) for name, entry in files.items()}


def verify_manifest(folder: Path, records: Mapping[str, FileRecord], verify: Verify = "hashes") -> None:
    """Raises CheckpointInvalid for the first file of `records` that is missing, or differs in size or hash."""
    paths = {}
    for name, record in records.items():
        path = member(folder, name)
        if not path.is_file():
            raise CheckpointInvalid.of(path, "is in the manifest but not in the folder")
        size = path.stat().st_size
        if size != record.size:
            raise CheckpointInvalid.of(path, f"has {size} bytes; the manifest says {record.size}")
        paths[path] = record
    if verify == "hashes":
        for path, found in _hashes(list(paths)).items():
            if found != paths[path].sha256:
                raise CheckpointInvalid.of(path, f"has SHA-256 {found}; the manifest says {paths[path].sha256}")


def listed_member(folder: Path, name: str, records: Mapping[str, FileRecord] | None) -> Path | None:
    """The file `name` of `folder`, None when there is none; `records` are the result of `read_manifest`.

    Raises CheckpointInvalid for a file that exists but is not in the manifest, so that nothing verifies it.
    """
    path = member(folder, name)
    if not path.is_file():
        return None
    require_listed(path, records)
    return path


def require_listed(path: Path, records: Mapping[str, FileRecord] | None) -> None:
    """Raises CheckpointInvalid when there is a manifest and the file at `path` is not in it."""
    if records is not None and path.name not in records:
        raise CheckpointInvalid.of(path, f"is not listed in {MANIFEST_NAME}")


def _hashes(paths: list[Path]) -> dict[Path, str]:
    # hashlib releases the interpreter lock, so threads hash files in parallel.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(file_sha256, paths), strict=True))


def _record(path: Path, name: str, entry: Any) -> FileRecord:
    sha256 = entry.get("sha256") if isinstance(entry, dict) else None
    size = entry.get("size") if isinstance(entry, dict) else None
    if not isinstance(sha256, str) or not isinstance(size, int) or isinstance(size, bool):
        raise CheckpointInvalid.of(path, f"the entry of {name!r} needs a string 'sha256' and a whole number 'size'")
    return FileRecord(sha256, size)
