"""Folders whose weights are stored in the quantised blocks of the GGUF file that they were converted from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_models.weights.block_layouts import GGUF_LAYOUTS
from attn_models.weights.safetensors_files import TensorEntry
from attn_models.weights.stored_format import CONFIG_KEY, Allowed, StoredFormat, refused

if TYPE_CHECKING:
    from torch import Tensor


class Gguf(StoredFormat):
    """Weights in a GGUF file's blocks, uint8 [outputs, bytes of a row]; `blocks` gives each tensor's type."""

    allowed: ClassVar[Allowed] = {"version": (1,), "blocks": None}

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        kinds = config.get("blocks")
        if not isinstance(kinds, Mapping) or not kinds:
            raise refused(path, "blocks", kinds, "an object that maps names of tensors to GGUF types")
        for kind in kinds.values():
            if not isinstance(kind, str) or kind not in GGUF_LAYOUTS:
                raise refused(path, "blocks", kind, " or ".join(GGUF_LAYOUTS))
        self.kinds = dict(kinds)

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The tensors that `blocks` names, each with one part, whose name is its type."""
        for name in self.kinds:
            if name not in entries:
                raise self.fail(name, f"is missing; {CONFIG_KEY} names it")
        return {name: {kind: name} for name, kind in self.kinds.items()}

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        entry, layout = entries[name], GGUF_LAYOUTS[next(iter(parts))]
        inputs = layout.inputs_of(entry.shape[1]) if len(entry.shape) == 2 and entry.dtype == "U8" else None
        if not inputs:
            rule = f"is {entry.dtype} {list(entry.shape)}, not U8 in rows of whole blocks of {layout.nbytes} bytes"
            raise self.fail(name, rule)
        return entry.shape[0], inputs

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32, by ggml's formula."""
        import torch

        ((kind, blocks),) = parts.items()
        return torch.from_numpy(GGUF_LAYOUTS[kind].dequantized(blocks.cpu().numpy())).to(blocks.device)

    def in_blocks(self, name: str, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The weight in its stored blocks."""
        from attn_models.quantization.block_tensor import BlockTensor

        ((kind, blocks),) = parts.items()
        if self.nonfinite == "refuse" and not GGUF_LAYOUTS[kind].is_finite(blocks):
            raise self.fail(name, "holds NaN or infinity")
        return BlockTensor(blocks, GGUF_LAYOUTS[kind])
