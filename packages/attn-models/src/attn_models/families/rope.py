"""What a config.json of transformers says of rotary positions, in versions 4 and 5, both ways."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue

DEFAULT_BASE = 10000.0
# Their keys by the fields of `attn_core`'s scalings, for every kind that is known here.
KEYS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "context": "original_max_position_embeddings",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "context": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "attention": "attention_factor",
        "whole_pairs": "truncate",
    },
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The base, the fraction of a head that is turned, and a scaling in words or None."""

    base: float = DEFAULT_BASE
    fraction: float = 1.0
    scaling: Mapping[str, Any] | None = None


def read_rope(values: Mapping[str, Any], base: float = DEFAULT_BASE) -> Rope:
    """Of a whole config.json: one object in version 5, keys beside each other in version 4."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise InvalidValue.of("rope_parameters", given, "an object")
    beside = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
    context = values.get("max_position_embeddings")
    return rope_of({"rope_theta": base, "original_max_position_embeddings": context, **beside, **given})


def rope_of(given: Mapping[str, Any]) -> Rope:
    """Of one object of rope parameters; raises `InvalidValue` for a scaling that is not known."""
    kind = given.get("rope_type", given.get("type", "default"))
    base, fraction = given.get("rope_theta", DEFAULT_BASE), given.get("partial_rotary_factor", 1.0)
    if kind == "default":
        return Rope(base=base, fraction=fraction)
    if kind not in KEYS:
        raise InvalidValue.of("rope_parameters.rope_type", kind, ", ".join(["default", *KEYS]))
    if not isinstance(given.get("factor"), (int, float)):
        raise InvalidValue.of("rope_parameters.factor", given.get("factor"), "a number from 1")
    words = {field: given[key] for field, key in KEYS[kind].items() if given.get(key) is not None}
    if kind == "yarn" and "attention" not in words and given.get("mscale") and given.get("mscale_all_dim"):
        words["attention"] = mscale(given["factor"], given["mscale"]) / mscale(given["factor"], given["mscale_all_dim"])
    return Rope(base=base, fraction=fraction, scaling={"kind": kind, **words})


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The object of version 5; raises `InvalidValue` for a scaling that it cannot say."""
    plain = {"rope_type": "default", "rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    if rope.scaling is None:
        return plain
    kind = rope.scaling["kind"]
    if kind not in KEYS:
        raise InvalidValue.of("rotary_scaling.kind", kind, ", ".join(KEYS))
    return plain | {"rope_type": kind, **{KEYS[kind][f]: v for f, v in rope.scaling.items() if f != "kind"}}


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys, 0.1 m ln(s) + 1 (arXiv 2309.00071; the weight m is DeepSeek-V2's)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
