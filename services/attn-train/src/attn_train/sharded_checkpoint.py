"""The files of a checkpoint: each worker writes the blocks of tensors that it holds, and any layout can read them.

They are written with `torch.distributed.checkpoint`, as safetensors files with block offsets as JSON metadata, which
torch's `HuggingFaceStorageReader` reads; no pickle is involved. A single worker writes the same format.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from attn_core.errors import CheckpointInvalid
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

SEPARATOR = "/"
"""The separator between the part and the name of a tensor."""

# This warning appears at every write and read by a single worker, where it is intended.
warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)


class Block(NamedTuple):
    """A block of a larger tensor: its offsets in it, and its elements."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Pieces:
    """A worker's blocks of a tensor of this shape; a block that several workers hold is written by only one of them."""

    shape: torch.Size
    blocks: tuple[Block, ...]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Return a write item for each block, for torch.distributed.checkpoint."""
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(block.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(block),
                    properties=TensorProperties.create_from_tensor(block.tensor),
                    size=self.shape,
                ),
            )
            for block in self.blocks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the metadata of the blocks, for torch.distributed.checkpoint."""
        return [_chunk(block) for block in self.blocks]

    def at(self, offsets: Any) -> Tensor:
        """Return the block at these offsets."""
        return next(block.tensor for block in self.blocks if block.offsets == tuple(offsets))


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=block.tensor.shape)


Held: TypeAlias = Tensor | Pieces
"""A tensor as a worker holds it: the whole tensor, or some blocks."""
Parts: TypeAlias = Mapping[str, Mapping[str, Held]]
"""Tensors by part and name: {"weights": {...}, "optimizer": {...}, "random": {...}}."""


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, Pieces) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 -- as torch calls it
    ) -> None:
        # The default method only supports tensors, and materialises those on the meta device.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, Pieces) else super().lookup_tensor(index)


class _Writer(HuggingFaceStorageWriter):
    """Writes files PART-WORKER-of-WORKERS.safetensors directly from the tensors, without an intermediate copy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            plan.storage_data["workers"] = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        from safetensors.torch import save_file

        files: dict[str, dict[str, WriteItem]] = {}
        for item in plan.items:
            part = item.index.fqn.partition(SEPARATOR)[0]
            # A file can hold only one block of a tensor.
            names = (part if not further else f"{part}-{further}" for further in range(len(plan.items)))
            name = next(name for name in names if item.index.fqn not in files.get(name, {}))
            files.setdefault(name, {})[item.index.fqn] = item
        for part, items in files.items():
            tensors, offsets = {}, {}
            for name, item in items.items():
                data = planner.resolve_data(item)
                if not isinstance(data, Tensor) or item.tensor_data is None:
                    raise TypeError(f"{name} is not a tensor")
                tensors[name] = data.detach().cpu().contiguous()
                offsets[name] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
            place = self.folder / self._file_name(part, plan.storage_data)
            save_file(tensors, place, {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)})
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _file_name(self, part: str, plan: Mapping[str, int]) -> str:
        if plan["workers"] == 1:
            return f"{part}.safetensors"
        return f"{part}-{plan['shard_index']:05d}-of-{plan['workers']:05d}.safetensors"


def write_shards(folder: Path, parts: Parts, group: dist.ProcessGroup | None = None) -> None:
    """Write this worker's files into `folder`, which may be a different one for each worker of `group`.

    A collective: every worker of `group` must call it; None means a single worker. Tensors that all workers hold are
    written by one of them. Raises `OSError` in all workers if one cannot write.
    """
    from safetensors import SafetensorError

    alone = group is None
    try:
        save(_flat(parts), storage_writer=_Writer(folder), planner=_SavePlanner(), process_group=group, no_dist=alone)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        kind = OSError if isinstance(cause, OSError | SafetensorError) else RuntimeError
        raise kind(f"{type(cause).__name__}: {cause}") from error


def stored_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors in the files of `folder`, by part and name, on the meta device: only shapes and dtypes."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _stored(folder):
        part, _, own = name.partition(SEPARATOR)
        found.setdefault(part, {})[own] = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
    return found


def read_shards(folder: Path, into: Parts) -> None:
    """Fill the tensors and pieces of `into` from the files of `folder`, which must have been verified.

    Raises `CheckpointInvalid` if a tensor is missing or has another shape.
    """
    flat, known = _flat(into), dict(_stored(folder))
    for name, held in flat.items():
        if name not in known:
            raise CheckpointInvalid.of(folder, f"has no tensor {name}")
        if known[name].size != held.shape:
            shapes = f"{tuple(known[name].size)}, not {tuple(held.shape)}"
            raise CheckpointInvalid.of(folder, f"{name} has the shape {shapes}")
    load(flat, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_LoadPlanner(), no_dist=True)


def read_whole(folder: Path, parts: Collection[str] | None = None) -> dict[str, dict[str, Tensor]]:
    """Read the whole tensors of some parts, by default all, from the files of `folder`, on the CPU."""
    found = {
        part: {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        for part, tensors in stored_tensors(folder).items()
        if parts is None or part in parts
    }
    read_shards(folder, found)
    return found


def _stored(folder: Path) -> Iterator[tuple[str, TensorStorageMetadata]]:
    for name, found in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            yield name, found


def _flat(parts: Parts) -> dict[str, Any]:
    return {
        f"{part}{SEPARATOR}{name}": held if isinstance(held, Pieces) else held.detach()
        for part, own in parts.items()
        for name, held in own.items()
    }
