"""Folders with quantised weights (`quantization_config`): GPTQ, AWQ, FP8, MXFP4, bitsandbytes, torchao and GGUF's
blocks.

When a weight is read, it is dequantised to float32 by the formula of the format's reference, or stays as stored where
kernels multiply it in that form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import CheckpointInvalid

from attn_models.weights.bitsandbytes_weights import BitsAndBytes
from attn_models.weights.fp8_weights import Fp8
from attn_models.weights.gguf_blocks import Gguf
from attn_models.weights.grouped_weights import Gptq, awq
from attn_models.weights.packed_weights import Mxfp4, compressed_tensors
from attn_models.weights.safetensors_files import LazyTensors, TensorEntry, is_finite
from attn_models.weights.stored_format import CONFIG_KEY, StoredFormat, refused
from attn_models.weights.torchao_weights import TorchAo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attn_models.weights.checkpoint_folder import CheckpointFolder

Read = Callable[[str], "Tensor"]


def with_plain_weights(checkpoint: CheckpointFolder, *, in_blocks: bool = False) -> CheckpointFolder:
    """The folder with dequantised weights and a config.json without `quantization_config`; unchanged if it has none.

    With `in_blocks`, weights that kernels multiply as stored are returned as `BlockTensor`.

    Raises `Incompatible` naming the part of the `quantization_config` that is not supported, and `CheckpointInvalid`
    for tensors that do not fit the format.
    """
    stored = format_of(checkpoint.config, checkpoint.path / "config.json")
    if stored is None:
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != CONFIG_KEY}
    return dataclasses.replace(checkpoint, config=config, tensors=DequantizedTensors(checkpoint, stored, in_blocks))


def format_of(config: Mapping[str, Any], path: Path) -> StoredFormat | None:
    """The storage format of the weights of a config.json, None where they are plain; raises as `with_plain_weights`."""
    given = config.get(CONFIG_KEY)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise CheckpointInvalid.of(path, f"{CONFIG_KEY} must be an object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise refused(path, "quant_method", method, " or ".join(repr(name) for name in FORMATS))
    return FORMATS[method](given, path)


class DequantizedTensors(LazyTensors):
    """The tensors of a folder by their plain names; quantised ones are dequantised when they are read."""

    def __init__(self, checkpoint: CheckpointFolder, stored: StoredFormat, in_blocks: bool = False) -> None:  # noqa: FBT001, FBT002
        import torch

        self._inner = checkpoint.tensors
        self._path, self._format = checkpoint.path, stored
        self.nonfinite, self.device = self._inner.nonfinite, self._inner.device
        self.addresses = self._inner.addresses
        self._in_blocks = in_blocks and torch.device(self.device).type in stored.devices
        stored.open(self._inner)
        weights = stored.weights(self._inner.entries)
        if not weights:
            rule = f"{CONFIG_KEY}: names {type(stored).__name__}, but no tensor is stored in that format; allowed: null"
            raise CheckpointInvalid.of(checkpoint.path / "config.json", rule)
        used = {name for parts in weights.values() for name in parts.values()}
        self._parts = weights
        plain = {name: entry for name, entry in self._inner.entries.items() if name not in used}
        if both := sorted(plain.keys() & weights.keys()):
            raise CheckpointInvalid.of(checkpoint.path, f"tensor {both[0]!r} is present both plain and quantised")
        shapes = {name: stored.shape(name, parts, self._inner.entries) for name, parts in weights.items()}
        self.entries = plain | {name: TensorEntry("F32", shape, 4 * prod(shape)) for name, shape in shapes.items()}

    def kept(self) -> dict[str, int]:
        """The size in bytes of each weight that stays as stored."""
        if not self._in_blocks:
            return {}
        sizes = {name: self._format.kept_bytes(parts, self._inner.entries) for name, parts in self._parts.items()}
        return {name: nbytes for name, nbytes in sizes.items() if nbytes is not None}

    def saved_bytes(self, dtype: torch.dtype) -> int:
        """See `LazyTensors`: weights that stay as stored keep their stored size."""
        return sum(prod(self.entries[name].shape) * dtype.itemsize - nbytes for name, nbytes in self.kept().items())

    def types(self) -> set[str]:
        """See `LazyTensors`: weights that stay as stored are not included."""
        kept = self.kept()
        return {entry.dtype for name, entry in self.entries.items() if name not in kept}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._inner[name]
        parts = {part: self._inner[own] for part, own in self._parts[name].items()}
        kept = self._format.in_blocks(name, parts) if self._in_blocks else None
        if kept is not None:
            return kept
        weight = self._format.dequantized(parts)
        if not is_finite(weight):
            raise CheckpointInvalid.of(self._path, f"tensor {name!r} holds NaN or infinity once it is dequantised")
        return weight.contiguous()


FORMATS: Mapping[str, Callable[[Mapping[str, Any], Path], StoredFormat]] = {
    "gptq": Gptq,
    "awq": awq,
    "fp8": Fp8,
    "compressed-tensors": compressed_tensors,
    "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes,
    "gguf": Gguf,
    "torchao": TorchAo,
}
"""Formats by `quant_method`."""
