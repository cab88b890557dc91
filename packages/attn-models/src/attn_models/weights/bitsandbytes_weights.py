"""Folders with weights in bitsandbytes' four bits (Dettmers et al. 2023, arXiv 2305.14314) or eight (2208.07339)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_models.weights.safetensors_files import LazyTensors, TensorEntry
from attn_models.weights.stored_format import Allowed, StoredFormat

if TYPE_CHECKING:
    from torch import Tensor

STATE = ".quant_state.bitsandbytes__"
"""What the name of the tensor with the sizes of a weight in four bits, as JSON, has after that of the weight."""
STATE_LIMIT = 1 << 16
LARGEST_INT8 = 127
TABLES = {"absmax": "scales", "quant_map": "numbers", "nested_absmax": "nested", "nested_quant_map": "nested_numbers"}


class BitsAndBytes(StoredFormat):
    """NF4 and FP4, whose blocks of consecutive weights share a scale, itself possibly in eight bits; or integers of
    eight bits with a scale for each output.

    Inputs are not quantised, as they are in bitsandbytes with eight bits.
    """

    allowed: ClassVar[Allowed] = {"load_in_4bit": (True, False), "load_in_8bit": (True, False)} | dict.fromkeys(
        [f"bnb_4bit_{key}" for key in ("compute_dtype", "quant_storage", "quant_type", "use_double_quant")]
        + [f"llm_int8_{key}" for key in ("enable_fp32_cpu_offload", "has_fp16_weight", "skip_modules", "threshold")]
    )

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__({key: value for key, value in config.items() if not key.startswith("_")}, path)
        self.states: dict[str, Mapping[str, Any]] = {}

    def open(self, tensors: LazyTensors) -> None:
        """Read the sizes of the weights in four bits."""
        for name in [name for name in tensors.entries if STATE in name]:
            weight = name.partition(STATE)[0]
            if tensors.entries[name].nbytes > STATE_LIMIT or tensors.entries[name].dtype != "U8":
                raise self.fail(name, "is not the JSON of a weight's sizes")
            try:
                state = json.loads(bytes(tensors[name].flatten().tolist()))
                sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
                fits = all(type(size) is int and size > 0 for size in sizes) and len(state["shape"]) > 0
                self.states[weight] = state
            except (ValueError, TypeError, KeyError) as error:
                raise self.fail(name, f"is not the JSON of a weight's sizes: {error}") from error
            if not fits:
                raise self.fail(name, f"says shape {state['shape']} in blocks of {state['blocksize']}")

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The weights in four bits, which `open` has found, and those with scales `SCB`."""
        found = {}
        for name in self.states:
            parts = {"codes": name} | {
                part: f"{name}.{leaf}" for leaf, part in TABLES.items() if f"{name}.{leaf}" in entries
            }
            state = next(own for own in entries if own.startswith(f"{name}{STATE}"))
            for needed in (name, f"{name}.absmax", f"{name}.quant_map"):
                if needed not in entries:
                    raise self.fail(needed, f"is missing, although {state!r} is present")
            found[name] = parts | {"state": state}
        for name in entries:
            layer, _, leaf = name.rpartition(".")
            if leaf == "SCB":
                noted = {"format": f"{layer}.weight_format"} if f"{layer}.weight_format" in entries else {}
                found[f"{layer}.weight"] = {"codes": f"{layer}.weight", "row_scales": name, **noted}
        return found

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape [outputs, inputs]."""
        codes = entries.get(parts["codes"])
        if codes is None:
            raise self.fail(name, "is missing, although its scales are present")
        if "row_scales" in parts:
            if codes.dtype != "I8" or len(codes.shape) != 2 or entries[parts["row_scales"]].shape != codes.shape[:1]:
                raise self.fail(name, f"is {codes.dtype} {list(codes.shape)}; needed: I8, with a scale for each output")
            return codes.shape
        state = self.states[name]
        shape, size = tuple(state["shape"]), state["blocksize"]
        count = ceil(prod(shape) / size)
        nested = ceil(count / state.get("nested_blocksize", 1)) if "nested" in parts else 0
        given = [entries[parts[part]].shape for part in ("scales", "numbers")]
        fits = codes.nbytes == ceil(prod(shape) / 2) and given == [(count,), (16,)]
        if not fits or ("nested" in parts and entries[parts["nested"]].shape != (nested,)):
            raise self.fail(name, f"of shape {list(shape)} in blocks of {size} does not fit the sizes of its tensors")
        return shape

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:  # noqa: ARG002
        """None: no kernel multiplies these formats as they are stored."""
        return None

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32: the number of each code times the scale of its block, or of its output."""
        import torch

        codes = parts["codes"]
        if "row_scales" in parts:
            if "format" in parts and int(parts["format"]) != 0:
                raise self.fail("weight_format", f"is {int(parts['format'])}; only rows (0) are supported")
            return codes.float() * (parts["row_scales"].float() / LARGEST_INT8)[:, None]
        state = json.loads(bytes(parts["state"].flatten().tolist()))
        scales = parts["scales"]
        if "nested" in parts:
            outer = parts["nested"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
            scales = parts["nested_numbers"][scales.long()] * outer + state.get("nested_offset", 0.0)
        packed = codes.contiguous().view(torch.uint8).flatten()
        count = prod(state["shape"])
        numbers = parts["numbers"].float()[torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[:count].long()]
        spread = scales.float().repeat_interleave(state["blocksize"])[:count]
        return (numbers * spread).view(state["shape"])
