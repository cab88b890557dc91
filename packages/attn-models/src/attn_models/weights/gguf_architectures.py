"""Model architectures that can be imported from GGUF: their config.json and tensor names in the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible, UnknownName

from attn_models.weights.gguf_reader import GgufHeader, require_model
from attn_models.weights.gguf_rope import FACTOR_TENSORS


@dataclass(frozen=True, slots=True)
class Part:
    """A GGUF tensor of this `shape` that is a part of a Hugging Face tensor.

    Its axes are permuted to the order `axes`, and it is then reshaped to `view`; () leaves it unchanged.
    """

    source: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    view: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The Hugging Face name and expected shape of a GGUF tensor, and the conversion between them.

    `rotary_heads` is the number of heads whose rows must be reordered, 0 for none: GGUF stores the two rows of a rotary
    pair next to each other, Hugging Face half a head apart. `subtracted` is the number to subtract from GGUF's values.
    `fused` holds the numbers of rows of the parts that GGUF stores one after the other, and Hugging Face in each of
    `groups` equal blocks. `expert` is the index in a GGUF tensor that stacks several experts, None for the whole
    tensor. A `transposed` matrix is [out, in] in GGUF, and [in, out] in `shape`. A tensor that consists of several, or
    has other axes, is made of `parts`, concatenated along their axis `axis`; `source` is that of the first. For a
    `decay` Hugging Face stores the logarithm of the negated value. `tiled`, an axis, a first index and two counts g and
    n, says that from this index on GGUF stores the first of n heads of all g groups, then the second ones and so on,
    and Hugging Face the n heads of each group.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    subtracted: float = 0.0
    fused: tuple[int, ...] = ()
    groups: int = 1
    expert: int | None = None
    transposed: bool = False
    parts: tuple[Part, ...] = ()
    axis: int = 0
    decay: bool = False
    tiled: tuple[int, ...] = ()

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """The shape of each GGUF tensor that it reads, for a stacked tensor the shape of one expert."""
        if self.parts:
            return {part.source: part.shape for part in self.parts}
        return {self.source: self.shape[::-1] if self.transposed else self.shape}


def matched(
    header: GgufHeader, placements: Iterable[Placement], family: str, *, has_factors: bool = False
) -> list[Placement]:
    """The placements in the file's order, after a check that no tensor is missing, left over or of a wrong shape.

    `has_factors` says that the config was read by `rope_parameters`, which describe the rotary factors of the file.
    Raises CheckpointInvalid naming the tensor.
    """
    expected: dict[str, list[tuple[Placement, tuple[int, ...]]]] = {}
    for placement in placements:
        for source, shape in placement.sources.items():
            expected.setdefault(source, []).append((placement, shape))
    unused = _unused(header)
    for name in header.tensors:
        known = name in expected or name in WITHOUT_EFFECT or (has_factors and name in FACTOR_TENSORS)
        if not known and not unused.match(name) and not _is_scale(header, name):
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} is unexpected in a {family} model")
    for name, uses in expected.items():
        if name not in header.tensors:
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} is missing")
        first, shape = uses[0]
        needed = list(shape if first.expert is None else (len(uses), *shape))
        given = list(header.tensors[name].shape)
        # Converters of 2024 leave out axes of one.
        if given != needed and given != [size for size in needed if size > 1]:
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} has shape {given}; its model needs {needed}")
    return [item for name in header.tensors for item, _ in expected.get(name, ()) if item.source == name]


WITHOUT_EFFECT = ("dec.blk.0.cross_attn_rel_b.weight", *(f"blk.0.time_mix_v{part}.weight" for part in range(3)))
"""Positions of the cross-attention of the first T5 checkpoints, which has none, and a network of RWKV-7's first layer,
which is a copy of another one."""
SCALED = ("NVFP4",)
"""Types whose tensors may have another one with scales beside them."""


def scale_of(name: str) -> str:
    """The name of the tensor that holds the scale, or the scales of the experts, of the weight `name`."""
    return f"{name.removesuffix('.weight')}.scale"


def _is_scale(header: GgufHeader, name: str) -> bool:
    """Whether a tensor is the scale of a weight, or of its inputs, which are not quantised here; raises
    CheckpointInvalid for a malformed one."""
    stem, _, leaf = name.rpartition(".")
    weight, scale = header.tensors.get(f"{stem}.weight"), header.tensors[name]
    if leaf not in ("scale", "input_scale") or weight is None or weight.type not in SCALED:
        return False
    counts = (1, weight.shape[0]) if len(weight.shape) > 2 else (1,)
    if scale.type != "F32" or scale.elements not in counts:
        raise CheckpointInvalid.of(
            header.path, f"tensor {name!r} is {scale.type} {list(scale.shape)}; needed: F32 of {counts[-1]} numbers"
        )
    return True


def layer_count(header: GgufHeader) -> int:
    """The number of layers, without those that draft tokens; raises CheckpointInvalid if it is above the number of
    tensors, or not above 0."""
    name = header.text("general.architecture")
    blocks, drafts = header.count(f"{name}.block_count"), header.metadata.get(f"{name}.{DRAFTS}", 0)
    if blocks > len(header.tensors) or type(drafts) is not int or not 0 <= drafts < blocks:
        rule = f"{blocks} layers, of which {drafts!r} draft tokens, in a file of {len(header.tensors)} tensors"
        raise CheckpointInvalid.of(header.path, rule)
    return blocks - drafts


DRAFTS = "nextn_predict_layers"
"""The key of the number of last layers that predict several tokens at once; they are skipped."""


def _unused(header: GgufHeader) -> re.Pattern[str]:
    """What the names of tensors begin with that layers do not use: those that draft tokens, and the keys and values of
    layers that attend to those of layers before them."""
    name, layers = header.text("general.architecture"), layer_count(header)
    key = f"{name}.attention.shared_kv_layers"
    shared = header.count(key) if header.metadata.get(key, 0) != 0 else 0
    starts = [rf"blk\.{layer}\.attn_(k|v|k_norm)\." for layer in range(max(layers - shared, 0), layers)]
    starts += [rf"blk\.{layer}\." for layer in range(layers, header.count(f"{name}.block_count"))]
    return re.compile("|".join(starts) or "(?!)")


def vocabulary_size(header: GgufHeader) -> int:
    """The vocabulary size: the number of rows of the embedding."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointInvalid.of(header.path, "tensor 'token_embd.weight' is missing or not a matrix")
    return embedding.shape[0]


def count_or(header: GgufHeader, key: str, default: int) -> int:
    """The whole number under a key, or the default where there is none."""
    return header.count(key) if key in header.metadata else default


def number_or(header: GgufHeader, key: str, default: float) -> float:
    """The number under a key, or the default where there is none."""
    return header.number(key) if key in header.metadata else default


READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        DRAFTS,
        "rope.freq_base",
        "rope.scaling.type",
    }
)
"""Keys of every architecture that become fields of the config."""
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
"""Keys that are skipped, and the values with which they have no effect."""
IGNORED_KEYS = frozenset({"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"})
"""Keys that describe how a file was made, or belong to a rotary scaling that is not used."""


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Converts one architecture's header to a Hugging Face config and tensor names.

    `name` is its `general.architecture`. `config` returns the config.json of a header, `placements` the destination of
    each tensor of a model with that config; they are checked against the file. `read` holds further keys that `config`
    uses beside `READ`, `passed` further keys that have no effect with these values. `families` are the model types of
    configs that `placements` takes.
    """

    name: str
    config: Callable[[GgufHeader], dict[str, Any]]
    placements: Callable[[GgufHeader, dict[str, Any]], list[Placement]]
    read: frozenset[str]
    passed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    families: frozenset[str] = frozenset()


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """The architecture of the file, from this package or from a plugin.

    Raises UnknownName naming those that can be imported, and Incompatible for a metadata key of the architecture that
    is unknown or would change the computation, and for a file that is not a whole model.
    """
    require_model(header)
    name = header.text("general.architecture")
    known = installed().gguf_architectures
    if name not in {architecture.name for architecture in known}:
        raise UnknownName.of("GGUF architecture", name, known.names())
    architecture: GgufArchitecture = known.get(name)
    passed = {**NEUTRAL_VALUES, **architecture.passed}
    for key in sorted(header.metadata):
        short_key = key.removeprefix(f"{name}.")
        if (
            short_key == key
            or short_key in READ | architecture.read | IGNORED_KEYS
            or header.metadata[key] in passed.get(short_key, ())
        ):
            continue
        allowed = (
            f"allowed: {' or '.join(map(repr, passed[short_key]))}" if short_key in passed else "the key is unknown"
        )
        given = f"{key} = {header.metadata[key]!r}"
        raise Incompatible(f"{header.path}: {given} cannot be imported; {allowed}", path=header.path, what=key)
    return architecture
