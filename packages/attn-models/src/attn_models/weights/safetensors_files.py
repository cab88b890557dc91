"""Safetensors files of a checkpoint: headers, shards, and tensors that are read lazily."""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from attn_core.errors import CheckpointInvalid
from attn_schema.cores import usable_memory
from safetensors import SafetensorError, safe_open

from attn_models.weights.safe_files import (
    member,
    parse_json_object,
    read_json_object,
    refuse_code_format,
    refuse_folder_without_weights,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

HEADER_LIMIT = 16 << 20
"""The limit on the size of a header in bytes; a header of 100,000 tensors has about 12 MB."""
SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) .* (?P<file>/.*)\n(?:[A-Z]\w+:.*\n)*?Anonymous: +0 kB$", re.MULTILINE
)
"""An unchanged mapping of a file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The header entry of one tensor: safetensors dtype name, shape, and size on disk in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors file at `path`, by name.

    Checks what the library does not (duplicate keys, other formats under this name) and the lengths; overlaps, holes
    and shapes that do not fit sizes are left to the library, which refuses them on opening.

    Raises CheckpointInvalid naming the file and the rule.
    """
    try:
        refuse_code_format(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise CheckpointInvalid.of(path, f"a header of {length} bytes does not fit a file of {size} bytes")
            content = file.read(length)
    except OSError as error:
        raise CheckpointInvalid.of(path, f"cannot be read: {error.strerror}") from error
    entries = parse_json_object(content, path)
    entries.pop("__metadata__", None)
    return {name: _entry(path, name, entry) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: object) -> TensorEntry:
    if isinstance(entry, dict):
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if isinstance(dtype, str) and _counts(shape) and _counts(offsets) and len(offsets) == 2:
            return TensorEntry(dtype, tuple(shape), offsets[1] - offsets[0])
    raise CheckpointInvalid.of(path, f"the header entry of tensor {name!r} is malformed")


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 32 << 20
BUFFER = re.compile(r"(rotary_emb\.inv_freq|position_ids|\.masked_bias|\.(attn|attention)\.bias)$")
"""Buffers that older models saved, such as causal masks: shards may hold them without a word in the index."""


def weight_files(folder: Path) -> dict[Path, dict[str, TensorEntry]]:
    """The weight files of `folder`, each with the header entries of its tensors.

    Raises CheckpointInvalid when there are none, a shard is missing, or index and shards disagree in more than buffers
    that the index leaves out.
    """
    single = member(folder, WEIGHTS_NAME)
    if single.is_file():
        return {single: read_header(single)}
    index = member(folder, INDEX_NAME)
    if not index.is_file():
        refuse_folder_without_weights(folder)
    weight_map = read_json_object(index, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointInvalid.of(index, "an index needs an object 'weight_map' from tensor names to file names")
    files = {}
    for name in sorted(set(weight_map.values())):
        path = member(folder, name)
        if not path.is_file():
            raise CheckpointInvalid.of(path, f"is missing; {INDEX_NAME} names it")
        files[path] = read_header(path)
    _compare(index, weight_map, files)
    return files


def _compare(index: Path, weight_map: dict[str, str], files: dict[Path, dict[str, TensorEntry]]) -> None:
    found = {(tensor, path.name) for path, entries in files.items() for tensor in entries}
    listed = set(weight_map.items())
    for tensor, name in sorted(listed - found):
        raise CheckpointInvalid.of(index, f"tensor {tensor!r} is not in {name}")
    for tensor, name in sorted(found - listed):
        if tensor in weight_map or not BUFFER.search(tensor):
            raise CheckpointInvalid.of(index, f"tensor {tensor!r} of {name} is not in the index")


Nonfinite = Literal["refuse", "allow"]
"""Whether a weight that is NaN or infinite is an error."""


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """Tensors by name, on `device`, in the dtype of the file; those on the CPU are memory-mapped copy-on-write.

    For another device each tensor is copied from the mapped file when it is read, so that the host's memory never holds
    the whole model. `entries` gives shapes and dtypes without reading tensors. `tensors[name]` raises CheckpointInvalid
    for a tensor with NaN or infinity, unless `nonfinite` is "allow", and KeyError for an unknown name. `addresses` has
    the names of the tensors that were read by the addresses at which they are mapped.
    """

    def __init__(
        self,
        files: Mapping[Path, Mapping[str, TensorEntry]],
        nonfinite: Nonfinite = "refuse",
        device: torch.device | str = "cpu",
    ) -> None:
        self.nonfinite = nonfinite
        self.device = device
        self.entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self.addresses: dict[int, str] = {}
        for path, entries in files.items():
            self._handles[path] = _opened(path)
            self.entries.update(entries)
            self._file_of.update(dict.fromkeys(entries, path))

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointInvalid.of(path, f"tensor {name!r} cannot be read: {error}") from error
        if self.nonfinite == "refuse" and not is_finite(tensor):
            raise CheckpointInvalid.of(path, f"tensor {name!r} holds NaN or infinity")
        self.addresses[tensor.data_ptr()] = name
        return tensor.to(self.device)

    def metadata(self) -> dict[str, str]:
        """The texts in the headers of the files that describe their tensors, by name."""
        return {name: said for handle in self._handles.values() for name, said in (handle.metadata() or {}).items()}

    def saved_bytes(self, dtype: torch.dtype) -> int:  # noqa: ARG002 -- floating-point weights save nothing
        """The bytes of memory that quantised weights save compared with the same weights in `dtype`."""
        return 0

    def types(self) -> set[str]:
        """The dtypes in which weights are stored, as safetensors names."""
        return {entry.dtype for entry in self.entries.values()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
"""The dtypes of safetensors that hold real numbers; the others hold whole or complex numbers, or codes."""


def require_floats(path: Path, entries: Mapping[str, TensorEntry], names: Iterable[str]) -> None:
    """Raises CheckpointInvalid for `path`, naming every tensor of these names that does not hold real numbers."""
    dtypes = {name: entries[name].dtype for name in sorted(names)}
    wrong = [f"tensor {name!r} is of dtype {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if wrong:
        raise CheckpointInvalid.of(path, f"{'; '.join(wrong)}; needed: {', '.join(FLOATS)}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; always true for integers and booleans."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    values = tensor.float() if tensor.element_size() == 1 else tensor
    # One pass without a copy, 30 times faster than isfinite(): a NaN propagates to both extremes.
    low, high = values.aminmax()
    return bool(low.isfinite() & high.isfinite())


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointInvalid.of(path, f"not a valid safetensors file: {error}") from error


def release_read_pages(folder: Path) -> None:
    """Free the memory of weights that were read from a folder's files and packed; what is read again is loaded again.

    A file stays mapped as long as one of its tensors is used as it is. Only mappings without changes are released, and
    only on Linux.
    """
    if not SMAPS.exists():
        return
    files = {str(path.resolve()) for path in folder.glob("*.safetensors")}
    madvise = ctypes.CDLL(None).madvise
    for mapping in MAPPING.finditer(SMAPS.read_text()):
        if mapping["file"] in files:
            start, end = int(mapping["start"], 16), int(mapping["end"], 16)
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def warn_of_memory(folder: Path) -> None:
    """Say how much memory a folder's weights need where this process may not use as much."""
    needed, most = sum(path.stat().st_size for path in folder.glob("*.safetensors")), usable_memory()
    if needed > most:
        log.warning(
            "%s: the weights need %.1f GB of memory, and this process may use %.1f GB. Pages of mapped files are read "
            "from the disk again in every step; weights that are packed and not yet kept beside the model, or "
            "converted to another dtype, are copied, for which memory will not suffice",
            folder, needed / 1e9, most / 1e9,
        )  # fmt: skip
