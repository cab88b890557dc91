"""Checkpoints that several workers write together, each its own shards, by `torch.distributed.checkpoint`.

Shards are safetensors files with their offsets as JSON (`HuggingFaceStorageWriter`): no file is a pickle. Any
other layout of workers, or one alone, reads them. Around the shards a checkpoint is as any other: a folder with a
manifest of hashes that is there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed
from attn_models.weights import read_manifest, staged_folder, verify_manifest
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

Parts = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by part: {"weights": {...}, "optimizer": {...}, "random": {...}}."""
SEPARATOR = "/"
"""Between the part and the name of a tensor."""
LONGEST_NAME = 4096


def write_sharded(target: Path, parts: Parts, files: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Write the folder `target` together with all workers of `group`; it is there when this returns, in each of them.

    A `DTensor` is written by those that hold its shards, any other tensor, which all hold alike, by one; `files` are
    texts beside them by name. Every worker calls this with tensors of the same names, and sees the folder at the same
    path. Raises `CheckpointWriteFailed` in all of them, with what was there before untouched.
    """
    failure: CheckpointWriteFailed | None = None
    try:
        with _shared_stage(target, group) as stage:
            _save(_flat(parts), stage, group)
            for name, text in files.items() if _first(group) else ():
                (stage / name).write_text(text, encoding="utf-8")
    except CheckpointWriteFailed as error:
        failure = error
    except OSError as error:
        failure = CheckpointWriteFailed.of(target, error)
    _agree(failure, target, group)


def read_sharded(path: Path, into: Parts, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `into`, whole ones or `DTensor`s of any layout, from a folder, in every worker of `group`.

    Raises `CheckpointInvalid` for a folder that is not what was written, or lacks a tensor of this name and shape.
    """
    records = read_manifest(path)
    if records is None:
        raise CheckpointInvalid.of(path, "has no manifest")
    verify_manifest(path, records)
    flat = _flat(into)
    known = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    for name, tensor in flat.items():
        found = known.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointInvalid.of(path, f"has no tensor {name}")
        if found.size != tensor.shape:
            raise CheckpointInvalid.of(path, f"{name} has the shape {tuple(found.size)}, not {tuple(tensor.shape)}")
    load(flat, storage_reader=HuggingFaceStorageReader(str(path)), process_group=group, no_dist=not _together())


def read_whole(path: Path) -> dict[str, dict[str, Tensor]]:
    """The whole tensors of a folder whose files were compared with its manifest, by part and name, on the CPU."""
    known = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    flat = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in known.items()
        if isinstance(found, TensorStorageMetadata)
    }
    load(flat, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        part, _, own = name.partition(SEPARATOR)
        parts.setdefault(part, {})[own] = tensor
    return parts


def _save(flat: dict[str, Tensor], stage: Path, group: dist.ProcessGroup | None) -> None:
    writer = HuggingFaceStorageWriter(str(stage), save_distributed=True)
    try:
        save(flat, storage_writer=writer, process_group=group, no_dist=not _together())
    except CheckpointException as error:
        told = next(iter(error.failures.values()))[0]
        raise OSError(f"{type(told).__name__}: {told}") from error


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{part}{SEPARATOR}{name}": tensor.detach() for part, own in parts.items() for name, tensor in own.items()}


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


def _first(group: dist.ProcessGroup | None) -> bool:
    return not _together() or dist.get_rank(group) == 0


@contextmanager
def _shared_stage(target: Path, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """The folder that the first worker stages, in all of them; it is sealed when the first one leaves the block.

    Raises `CheckpointWriteFailed` in all of them where it cannot be made.
    """
    if not _first(group):
        named = _told("", group)
        if not named:
            raise CheckpointWriteFailed.of(target, OSError("the first worker could not make the folder"))
        yield Path(named)
        return
    told = False
    try:
        with staged_folder(target) as stage:
            _told(str(stage), group)
            told = True
            yield stage
    finally:
        if not told:
            _told("", group)


def _told(text: str, group: dist.ProcessGroup | None) -> str:
    """The text of the first worker, in all of them."""
    if not _together():
        return text
    data = torch.zeros(LONGEST_NAME, dtype=torch.uint8)
    given = text.encode()
    data[: len(given)] = torch.frombuffer(bytearray(given or b"\0"), dtype=torch.uint8)[: len(given)]
    dist.broadcast(data, group=group, group_src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()


def _agree(failure: CheckpointWriteFailed | None, target: Path, group: dist.ProcessGroup | None) -> None:
    """Raise in every worker what failed in one of them."""
    if _together():
        failed = torch.tensor([int(failure is not None)])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if failure is None and int(failed):
            failure = CheckpointWriteFailed.of(target, OSError("another worker could not write its part"))
    if failure is not None:
        raise failure
