"""The store of measured launch parameters: one file per device, Triton version and source text of the kernels."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from attn_core.errors import cleaning_up

from attn_kernels_triton import kernels
from attn_kernels_triton.tuning.candidates import Candidate, every

FOLDER = "ATTN_TUNING"
"""The environment variable that names the folder; the default is attn/triton in the user's cache folder."""


def path_of(device: str) -> Path:
    """The file of a device, given the name that its driver reports."""
    made = json.dumps(origin(device), sort_keys=True).encode()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn" / "triton"
    return Path(os.environ.get(FOLDER) or home) / f"{hashlib.sha256(made).hexdigest()[:32]}.json"


def origin(device: str) -> dict[str, str]:
    """The conditions that a measurement is valid for: device, Triton version and digest of the kernels."""
    return {"device": device, "triton": triton.__version__, "programs": digest()}


@cache
def digest() -> str:
    """A hash of the source text of all kernels."""
    found = hashlib.sha256()
    for path in sorted(Path(str(kernels.__file__)).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def read(device: str) -> dict[str, Candidate]:
    """The stored candidates of a device by the name of their kind; empty if there is no file.

    A file that `add` did not write for this device is ignored with a `RuntimeWarning`.
    """
    path = path_of(device)
    try:
        return choices_of(json.loads(path.read_text(encoding="utf-8")), origin(device))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"ignoring {path}, the default launch parameters are used: {error}", RuntimeWarning, stacklevel=2)
        return {}


def choices_of(content: dict[str, Any], made: dict[str, str]) -> dict[str, Candidate]:
    """Parse the content of a file; raises `ValueError` for another origin or an entry that is no candidate of its
    kind."""
    if content["origin"] != made:
        raise ValueError(f"it was measured for {content['origin']}, not for {made}")
    known = every()
    return {name: candidate_of(known.get(name, ()), name, written) for name, written in content["choices"].items()}


def candidate_of(known: tuple[Candidate, ...], name: str, written: object) -> Candidate:
    """The known candidate that equals an entry of a file; raises `ValueError` if there is none."""
    for candidate in known:
        if json.loads(json.dumps(candidate)) == written:
            return candidate
    raise ValueError(f"{written} is not a candidate of {name!r}")


def add(device: str, found: dict[str, Candidate]) -> Path:
    """Merge candidates into the file of a device and return its path.

    The file is replaced atomically for readers, and writers are serialized by a lock.
    """
    path = path_of(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_suffix(".lock")):
        content = {"origin": origin(device), "choices": {**read(device), **found}}
        number, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, sort_keys=True)
            Path(name).replace(path)
        except BaseException:
            with cleaning_up("the partial choices"):
                Path(name).unlink(missing_ok=True)
            raise
    return path


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that one process at a time runs the block."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


Kept = TypeVar("Kept", bound=Candidate)


def known(kind: type[Kept], name: str, device: torch.device) -> Kept | None:
    """The candidate that was measured as the fastest for the kind of this name on a device, or None."""
    found = measured(name_of(device)).get(name)
    return found if isinstance(found, kind) else None


@cache
def measured(device: str) -> dict[str, Candidate]:
    """The stored candidates of devices of this name, read once per process."""
    return read(device)


@cache
def name_of(device: torch.device) -> str:
    """The name that the driver reports for a GPU; the device type for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
