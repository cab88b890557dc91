"""Rotary positions in GGUF files: metadata, or for Llama 3.1 and later a tensor of factors."""

from __future__ import annotations

import math
import struct
from typing import Any

from attn_core.errors import CheckpointInvalid, Incompatible

from attn_models.weights.gguf_reader import GgufHeader

FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies [head_dim / 2], float32."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of most published models with such factors (Llama 3.1 to 3.3, EXAONE 4, Apertus), besides its factor."""
LLAMA4 = LLAMA3 | {"high_freq_factor": 1.0}
"""That of Llama 4, which has no wavelengths between short and long ones."""
LONG = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The tensors of divisors of LongRoPE, within the training context and beyond it, by their keys in config.json."""
FACTOR_TENSORS = frozenset({FACTORS, *LONG.values()})
MOST_FACTORS = 4096


def shortest_float32(value: float) -> float:
    """The decimal with the fewest digits that gives the same float32: 1e-05 for 9.999999747378752e-06."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == packed:
            return candidate
    return value


def rope_parameters(header: GgufHeader, name: str) -> dict[str, Any]:
    """The rotary base and scaling of an architecture `name`; raises as `rope_scaling`."""
    key = f"{name}.rope.freq_base"
    base = shortest_float32(header.number(key) if key in header.metadata else 10000.0)
    return {"rope_type": "default", "rope_theta": base} | rope_scaling(header, name, base)


def rope_scaling(header: GgufHeader, name: str, base: float) -> dict[str, Any]:
    """The rotary scaling of an architecture `name`; raises Incompatible for an unknown kind or unknown factors."""
    stretched = header.metadata.get(f"{name}.rope.scaling.factor", 1.0) not in (0.0, 1.0)
    # As in llama.cpp, a factor without a kind is that of linear scaling.
    kind = header.metadata.get(f"{name}.rope.scaling.type", "linear" if stretched else "none")
    if FACTORS in header.tensors:
        return _llama3(header, base, kind)
    if all(tensor in header.tensors for tensor in LONG.values()):
        return _longrope(header, name)
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        rule = f"rotary scaling {kind!r} is not supported for {name}"
        raise Incompatible(f"{header.path}: {rule}", path=header.path, what="rope.scaling.type")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": header.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.count(f"{name}.rope.scaling.original_context_length")
        given = {key: f"{name}.rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow")}
        found = {key: header.number(place) for key, place in given.items() if place in header.metadata}
        scaling |= {key: shortest_float32(number) for key, number in found.items()}
    return scaling


def _longrope(header: GgufHeader, name: str) -> dict[str, Any]:
    """LongRoPE, with the file's own factor on queries and keys."""
    factors = {key: [shortest_float32(one) for one in factors_of(header, tensor)] for key, tensor in LONG.items()}
    given = f"{name}.rope.scaling.attn_factor"
    stretched = {"attention_factor": header.number(given)} if given in header.metadata else {}
    return {"rope_type": "longrope", **factors, **stretched}


def _llama3(header: GgufHeader, base: float, kind: Any) -> dict[str, Any]:
    """The scaling `llama3` whose factors the file has; raises Incompatible for any others."""
    from attn_core.rotary import Llama3Scaling, unscaled

    found = factors_of(header)
    wide = shortest_float32(max(found))
    for said in (LLAMA3, LLAMA4):
        low, high, context = said.values()
        scaling = Llama3Scaling(factor=wide, low=low, high=high, original_max_position_embeddings=int(context))
        pairs = zip(unscaled(base, 2 * len(found)), scaling.frequencies(base, 2 * len(found)), found, strict=True)
        if kind == "none" and all(abs(plain / scaled - factor) <= 1e-5 * factor for plain, scaled, factor in pairs):
            return {"rope_type": "llama3", "factor": wide, **said} if wide > 1 else {}
    rule = f"the factors of {FACTORS!r} (up to {wide:g}) are not those of Llama 3's rotary scaling {LLAMA3}"
    raise Incompatible(f"{header.path}: {rule}; they cannot be described", path=header.path, what=FACTORS)


def factors_of(header: GgufHeader, name: str = FACTORS) -> tuple[float, ...]:
    """The divisors that a tensor holds; raises CheckpointInvalid for any but positive numbers in float32."""
    tensor = header.tensors[name]
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.elements > MOST_FACTORS:
        rule = f"is {tensor.type} of shape {list(tensor.shape)}; needed: F32 of shape [head size / 2]"
        raise CheckpointInvalid.of(header.path, f"tensor {name!r} {rule}")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{tensor.elements}f", file.read(tensor.nbytes))
    if not all(0 < one < math.inf for one in factors):
        raise CheckpointInvalid.of(header.path, f"tensor {name!r} holds numbers that are not above 0")
    return factors
