"""The base class of weight storage formats that a `quantization_config` describes, and the check of its keys."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import CheckpointInvalid, Incompatible

from attn_models.weights.safetensors_files import LazyTensors, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_KEY = "quantization_config"
NOTES = re.compile(
    r"quant_method|method|meta|model_name_or_path|model_file_base_name|uuid|tokenizer|dataset|batch_size|model_seqlen"
    r"|pad_token_id|desc_act|act_group_aware|sym|true_sequential|static_groups|damp_percent|damp_auto_increment|lm_head"
    r"|quantizer|backend|use_exllama|exllama_config|disable_exllama|max_input_length|use_cuda_fp16|do_fuse"
    r"|fuse_max_seq_len|modules_in_block_to_quantize|block_name_to_quantize|module_name_preceding_first_block"
    r"|cache_block_outputs|modules_to_not_convert|modules_to_convert|ignored_layers|ignore|dequantize|run_compressed"
    r"|global_compression_ratio|quantization_status|moe_sparsity_config"
)
"""Keys of any format about how a model was quantised, which weights were (their tensors say so) or how it is run.

Every class of transformers writes those of its base classes too, whatever the format."""
Allowed = Mapping[str, tuple[Any, ...] | None]
"""Keys of a config with the values that are supported; None where any value is accepted by this check."""


class StoredFormat(ABC):
    """A storage format of weights that a `quantization_config` describes."""

    allowed: ClassVar[Allowed]
    """The keys that describe the stored numbers, with the values that are supported."""
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Types of devices on which kernels may multiply weights as stored."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.path = path
        require_known({key: value for key, value in config.items() if not NOTES.fullmatch(key)}, self.allowed, path)

    def open(self, tensors: LazyTensors) -> None:
        """Read what the format keeps in values, before the methods below are called."""
        self.nonfinite = tensors.nonfinite

    @abstractmethod
    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The quantised weights by their plain names: for each, the names of its stored tensors by part."""

    @abstractmethod
    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape of a weight; raises `CheckpointInvalid` where its parts do not fit together."""

    @abstractmethod
    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32."""

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:
        """The size in bytes of the result of `in_blocks`, without reading the weight; None where it returns None."""
        return sum(entries[own].nbytes for own in parts.values())

    def in_blocks(self, name: str, parts: Mapping[str, Tensor]) -> Tensor | None:  # noqa: ARG002 -- of some formats
        """The weight as a `BlockTensor` with the same values; None where no kernel can use it."""
        return None

    def fail(self, name: str, rule: str) -> CheckpointInvalid:
        """The error for a weight whose stored tensors break a rule."""
        return CheckpointInvalid.of(self.path.parent, f"tensor {name!r}: {rule}")


def require_known(config: Mapping[str, Any], allowed: Allowed, path: Path, place: str = "") -> None:
    """Raise `Incompatible` for a key that is unknown and not null, or has an unsupported value."""
    for key, value in config.items():
        if key not in allowed and value is not None:
            raise refused(path, f"{place}{key}", value, f"one of the keys {', '.join(sorted(allowed))}")
        values = allowed.get(key)
        if values is not None and value not in values:
            raise refused(path, f"{place}{key}", value, " or ".join(repr(item) for item in values))


def refused(path: Path, key: str, value: Any, allowed: str) -> Incompatible:
    """The error for an unsupported value in a quantization config."""
    shown = repr(value)[:100]
    return Incompatible(f"{path}: {CONFIG_KEY}.{key}: {shown} is not supported; allowed: {allowed}", field=key)
