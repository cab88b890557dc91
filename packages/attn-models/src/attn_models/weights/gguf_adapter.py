"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them and llama-adapter.cpp reads them.

For a matrix NAME of the base's file, the tensors NAME.lora_a [rank, inputs] and NAME.lora_b [outputs, rank] are its
factors, and `adapter.lora.alpha` / rank is the factor of their product, or 1 with an alpha of 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible
from numpy.typing import NDArray

from attn_models.weights.gguf_architectures import GgufArchitecture, Placement
from attn_models.weights.gguf_child import dequantised, in_order
from attn_models.weights.gguf_reader import GgufHeader, read_gguf_header

DOWN, UP = ".lora_a", ".lora_b"
TYPE, ALPHA = "adapter.type", "adapter.lora.alpha"
DTYPES = ("F32", "F16", "BF16", "Q8_0")
"""The types in which the converter writes factors."""
MATRIX = 2
"""The number of axes of a matrix."""
EMBEDDING = "token_embd.weight"
REPOSITORY = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)")


@dataclass(frozen=True)
class GgufFactors:
    """A [rank, inputs] and B [outputs, rank] of a matrix as the Hugging Face layout has it, and the scale of B A."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scaling: float


def base_of_gguf(file: Path) -> str:
    """The repository OWNER/REPO of the base that the header names; empty if it names none."""
    url = read_gguf_header(file).metadata.get("general.base_model.0.repo_url")
    found = REPOSITORY.fullmatch(url) if isinstance(url, str) else None
    return "" if found is None else found[1]


def read_gguf_factors(file: Path, base: Mapping[str, Any]) -> dict[str, GgufFactors]:
    """The factors in a file by the names of the weights that they change, for a model with the config.json `base`.

    Raises CheckpointInvalid for a malformed file, Incompatible for an adapter of another architecture or with tensors
    that are not of LoRA, such as norms, which llama.cpp ignores.
    """
    header = read_gguf_header(file)
    alpha = _alpha(header)
    placements: dict[str, list[Placement]] = {}
    for placement in _placements(header, base):
        placements.setdefault(placement.source, []).append(placement)
    found: dict[str, GgufFactors] = {}
    for stem in dict.fromkeys(name.removesuffix(DOWN).removesuffix(UP) for name in header.tensors):
        if stem in header.tensors:
            raise Incompatible(f"{file}: tensor {stem!r} is not of LoRA; allowed: names that end in {DOWN} or {UP}")
        if stem not in placements:
            raise Incompatible(f"{file}: the base model has no matrix {stem!r}, which the adapter changes")
        for placement in placements[stem]:
            a, b = _factors(header, placement)
            found[placement.target] = GgufFactors(a, b, alpha / len(a) if alpha else 1.0)
    return found


def _alpha(header: GgufHeader) -> float:
    for key, allowed in (("general.type", "adapter"), (TYPE, "lora")):
        if header.text(key) != allowed:
            rule = f"{key} is {header.text(key)[:60]!r}; allowed: {allowed!r}"
            raise Incompatible(f"{header.path}: {rule}", path=header.path, what=key)
    for key in header.metadata:
        if key.startswith("adapter.") and key not in (TYPE, ALPHA):
            rule = f"{key} may change what the adapter computes; allowed: {TYPE} and {ALPHA}"
            raise Incompatible(f"{header.path}: {rule}", path=header.path, what=key)
    alpha = header.metadata.get(ALPHA, 0.0)
    if not isinstance(alpha, float) or not 0 <= alpha < math.inf:
        raise CheckpointInvalid.of(header.path, f"{ALPHA} is {alpha!r}; it must be a finite number of at least 0")
    return alpha


def _placements(header: GgufHeader, base: Mapping[str, Any]) -> list[Placement]:
    """The matrices of the base, if files of the adapter's architecture hold such models."""
    name, family = header.text("general.architecture"), base.get("model_type")
    known = installed().gguf_architectures
    architecture: GgufArchitecture | None = known.get(name) if name in known.names() else None
    if architecture is None or family not in architecture.families:
        allowed = "a folder of one of: " + ", ".join(sorted(architecture.families)) if architecture else "none"
        rule = f"an adapter of the architecture {name!r} for a base of the family {family!r}; bases: {allowed}"
        raise Incompatible(f"{header.path}: is {rule}", path=header.path, what="general.architecture")
    plain = {key: value for key, value in base.items() if key != "quantization_config"}
    return architecture.placements(header, plain)


def _factors(header: GgufHeader, placement: Placement) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A and B of a matrix, whose rows are moved as those of the matrix itself."""
    source = placement.source
    if placement.transposed or placement.parts or placement.decay or len(placement.shape) != MATRIX:
        # The converter takes PEFT's factors of a transposed matrix for those of the matrix, which no program can use.
        raise Incompatible(f"{header.path}: {source!r} is stored in another form than its base: it has no factors")
    factors = []
    for leaf in (DOWN, UP):
        tensor = header.tensors.get(source + leaf)
        if tensor is None or tensor.type not in DTYPES or len(tensor.shape) != MATRIX + (placement.expert is not None):
            given = "missing" if tensor is None else f"{tensor.type} {list(tensor.shape)}"
            rule = f"a matrix in {', '.join(DTYPES)}" if placement.expert is None else "one for each expert"
            raise CheckpointInvalid.of(header.path, f"tensor '{source}{leaf}' is {given}; needed: {rule}")
        if placement.expert is not None and placement.expert >= tensor.shape[0]:
            rule = f"tensor '{source}{leaf}' is of {tensor.shape[0]} experts, its base of more"
            raise CheckpointInvalid.of(header.path, rule)
        factors.append(dequantised(header, tensor, placement.expert))
    a, b = (factors[1].T, factors[0]) if source == EMBEDDING else factors
    if (a.shape[1], len(b)) != placement.shape[::-1] or len(a) != b.shape[1]:
        rule = f"{source!r}: A {list(a.shape)} and B {list(b.shape)} are not of a matrix {list(placement.shape)}"
        raise CheckpointInvalid.of(header.path, rule)
    columns = bool(placement.tiled) and placement.tiled[0] == 1
    return (in_order(a, placement), b) if columns else (a, in_order(b, placement))
