"""PEFT's adapter_config.json: the fields that are read, and those that would change what an adapter computes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid

from attn_models.weights.gguf_adapter import base_of_gguf
from attn_models.weights.gguf_reader import is_gguf_adapter
from attn_models.weights.safe_files import read_json_object

ADAPTER_CONFIG_NAME = "adapter_config.json"
CONFIG_LIMIT = 1 << 20
"""The largest size in bytes of an adapter_config.json."""

NEEDED = ("peft_type", "r", "lora_alpha")

WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
    }
)
"""Fields that only describe the training of an adapter, or information that its tensors contain too."""

ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "loftq_config": (None, {}),
    "megatron_config": (None,),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Fields that change what is computed, and the values for which an adapter is a plain LoRA or DoRA."""

LISTS = ("target_parameters", "modules_to_save", "trainable_token_indices")
"""Fields that are written only if they are not empty."""
READ = frozenset({*NEEDED, "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", *LISTS})


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The config of an adapter: its rank, its scale and its base.

    The output of an adapter layer is multiplied by `lora_alpha` / `r`, or by `lora_alpha` / √`r` with `use_rslora`.
    `rank_pattern` and `alpha_pattern` override both for layers whose names end in a match of their keys.
    `target_parameters` are the ends of the names of parameters that are adapted as such, not as linear layers: stacks
    of experts, and weights (see `attn_models.lora.experts`); patterns match the names of these. `modules_to_save` are
    the ends of the names of layers whose weights are replaced, `trainable_token_indices` the ids of tokens whose
    embeddings are: see `attn_models.lora.tables`. With `ensure_weight_tying`, what is tied in the base stays so.
    `base_model`
    is the name or path of the base, `base_sha256` the hash of its weights; both are empty if unknown.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] = ()
    ensure_weight_tying: bool = False
    base_model: str = ""
    base_sha256: str = ""

    def scaling(self, module: str) -> float:
        """The factor of the low-rank product of the layer that the base's checkpoint calls `module`."""
        rank, alpha = self.rank(module), _matched(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        """The rank of the layer that the base's checkpoint calls `module`."""
        return int(_matched(self.rank_pattern, module, self.r))

    def to_json(self, modules: Iterable[str]) -> dict[str, Any]:
        """The content of PEFT's adapter_config.json for an adapter of the layers `modules` besides its parameters."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model or None,
            "inference_mode": True,
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(modules),
            "bias": "none",
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            **{name: list(given) for name in LISTS if (given := getattr(self, name))},
            **({"ensure_weight_tying": True} if self.ensure_weight_tying else {}),
        }


def adapter_config_of(values: Mapping[str, Any], path: Path, base_sha256: str = "") -> AdapterConfig:
    """The config from the content `values` of the adapter_config.json at `path`.

    Raises `CheckpointInvalid`, naming the field, for one that is missing, unknown, or needs more than plain LoRA or
    DoRA.
    """
    for key in NEEDED:
        if values.get(key) is None:
            raise CheckpointInvalid.of(path, f"{key} is missing")
    unknown = sorted(values.keys() - READ - WITHOUT_EFFECT - ALLOWED.keys() - {"base_model_name_or_path"})
    if unknown:
        raise CheckpointInvalid.of(path, f"unknown field {unknown[0]!r}, which may change what the adapter computes")
    for key, allowed in ALLOWED.items():
        if key in values and not any(type(values[key]) is type(one) and values[key] == one for one in allowed):
            choices = " or ".join(repr(one) for one in allowed)
            raise CheckpointInvalid.of(path, f"{key} is {values[key]!r}; allowed: {choices}")
    if values.get("use_dora") and values.get("target_parameters"):
        raise CheckpointInvalid.of(path, "use_dora is true with target_parameters, which DoRA is not defined for")
    return AdapterConfig(
        r=_number(values, "r", path, whole=True),
        lora_alpha=_number(values, "lora_alpha", path),
        use_rslora=_flag(values, "use_rslora", path),
        use_dora=_flag(values, "use_dora", path),
        rank_pattern=_pattern(values, "rank_pattern", path, whole=True),
        alpha_pattern=_pattern(values, "alpha_pattern", path),
        target_parameters=_listed(values, "target_parameters", path),
        modules_to_save=_listed(values, "modules_to_save", path),
        trainable_token_indices=_listed(values, "trainable_token_indices", path, int),
        base_model=str(values.get("base_model_name_or_path") or ""),
        base_sha256=base_sha256,
    )


def matches(pattern: str, module: str) -> bool:
    """Whether a key of PEFT's patterns matches the name of a module: all of it, or its end after a dot."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _matched(pattern: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in pattern.items() if matches(key, module)), default)


def _number(values: Mapping[str, Any], key: str, path: Path, *, whole: bool = False) -> Any:
    value: Any = values[key]
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:  # type: ignore[operator]
        raise CheckpointInvalid.of(
            path, f"{key} is {value!r}; it must be a {'whole number from 1' if whole else 'number above 0'}"
        )
    return value


def _flag(values: Mapping[str, Any], key: str, path: Path) -> bool:
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointInvalid.of(path, f"{key} is {value!r}; it must be true or false")
    return value


def _listed(values: Mapping[str, Any], key: str, path: Path, kind: type = str) -> tuple[Any, ...]:
    given = values.get(key) or []
    if isinstance(given, Mapping) and len(given) == 1 and kind is int:  # the indices of one embedding, by its name
        given = next(iter(given.values()))
    if not isinstance(given, list) or not all(type(one) is kind for one in given):
        raise CheckpointInvalid.of(path, f"{key} is {given!r}; it must be a list of {kind.__name__}")
    return tuple(given)


def _pattern(values: Mapping[str, Any], key: str, path: Path, *, whole: bool = False) -> dict[str, Any]:
    given = values.get(key) or {}
    if not isinstance(given, Mapping):
        raise CheckpointInvalid.of(path, f"{key} must be an object")
    found = {}
    for name in given:
        try:
            re.compile(name)
        except re.error as error:
            raise CheckpointInvalid.of(path, f"{key}: {name!r} is not a regular expression: {error}") from error
        found[name] = _number(given, name, path, whole=whole)
    return found


def is_adapter(source: Path) -> bool:
    """Whether a folder or a GGUF file contains an adapter and not a model."""
    if source.is_file():
        return is_gguf_adapter(source)
    return (source / ADAPTER_CONFIG_NAME).is_file() and not (source / "config.json").is_file()


def base_of(source: Path) -> str:
    """The name or path of the base in an adapter's folder or GGUF file; empty if it names none."""
    if source.is_file():
        return base_of_gguf(source)
    return str(read_json_object(source / ADAPTER_CONFIG_NAME, CONFIG_LIMIT).get("base_model_name_or_path") or "")
