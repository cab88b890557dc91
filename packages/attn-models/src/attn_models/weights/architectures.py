"""The model architectures that can be imported from GGUF, by the name in general.architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attn_core.errors import UnknownName

from attn_models.weights.gemma_layout import gemma_config, gemma_placements
from attn_models.weights.gguf_header import GgufHeader
from attn_models.weights.llama_layout import llama_config, llama_placements
from attn_models.weights.placement import Placement


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's header becomes a Hugging Face configuration and tensor names."""

    config: Callable[[GgufHeader], dict[str, Any]]
    placements: Callable[[GgufHeader, dict[str, Any]], list[Placement]]


ARCHITECTURES = {
    "llama": Architecture(llama_config, llama_placements),
    "gemma3": Architecture(gemma_config, gemma_placements),
}


def architecture_of(header: GgufHeader) -> Architecture:
    """The architecture of the file. Raises UnknownName naming those that can be imported."""
    name = header.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownName.of("GGUF architecture", name, ARCHITECTURES)
    return ARCHITECTURES[name]
