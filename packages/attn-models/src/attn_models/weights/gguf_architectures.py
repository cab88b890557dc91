"""Model architectures that can be imported from GGUF: their config.json and tensor names in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible, UnknownName

from attn_models.weights.gguf_reader import GgufHeader, require_model
from attn_models.weights.gguf_rope import FACTORS, rope_parameters, shortest_float32


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
    `decay` Hugging Face stores the logarithm of the negated value.
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
    for name in header.tensors:
        if name not in expected and not (has_factors and name == FACTORS):
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} is unexpected in a {family} model")
    for name, uses in expected.items():
        if name not in header.tensors:
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} is missing")
        first, shape = uses[0]
        needed = list(shape if first.expert is None else (len(uses), *shape))
        if list(header.tensors[name].shape) != needed:
            given = list(header.tensors[name].shape)
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} has shape {given}; its model needs {needed}")
    return [item for name in header.tensors for item, _ in expected.get(name, ()) if item.source == name]


def layer_count(header: GgufHeader) -> int:
    """The number of layers; raises CheckpointInvalid if it is above the number of tensors."""
    layers = header.count(f"{header.text('general.architecture')}.block_count")
    if layers > len(header.tensors):
        raise CheckpointInvalid.of(header.path, f"{layers} layers in a file of {len(header.tensors)} tensors")
    return layers


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


OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the Llama model in `header`.

    Raises Incompatible for what the layout cannot express (experts, partial rotary positions) and
    CheckpointInvalid for missing or invalid metadata.
    """
    heads = header.count("llama.attention.head_count")
    width = header.count("llama.embedding_length")
    key_value_heads = count_or(header, "llama.attention.head_count_kv", heads)
    head_size = count_or(header, "llama.attention.key_length", width // heads)
    _refuse_unsupported(header, head_size)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "dtype": "bfloat16",
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": header.count("llama.feed_forward_length"),
        "max_position_embeddings": header.count("llama.context_length"),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layer_count(header),
        "num_key_value_heads": key_value_heads,
        "rms_norm_eps": shortest_float32(header.number("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope_parameters(header, "llama"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": vocabulary_size(header),
    }
    if heads % key_value_heads:
        raise CheckpointInvalid.of(
            header.path, f"{heads} query heads are not a multiple of {key_value_heads} key/value heads"
        )
    return config


def llama_placements(header: GgufHeader, config: dict[str, Any]) -> list[Placement]:
    """A placement for every tensor of the file, and a check that none is missing or of a wrong shape.

    Raises CheckpointInvalid naming the tensor.
    """
    return matched(header, _expected(config), "Llama", has_factors=True)


def _expected(config: dict[str, Any]) -> list[Placement]:
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocabulary, width)
    placements = [Placement(name, OUTER_NAMES[name], shape) for name, shape in shapes.items()]
    for layer in range(config["num_hidden_layers"]):
        placements += _layer(config, layer)
    return placements


def _layer(config: dict[str, Any], layer: int) -> list[Placement]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    rotary = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    placements = []
    for part, shape in shapes.items():
        source, target = f"blk.{layer}.{part}", f"model.layers.{layer}.{LAYER_NAMES[part]}"
        heads = rotary.get(part, 0)
        placements.append(Placement(f"{source}.weight", f"{target}.weight", shape, rotary_heads=heads))
        biased = len(shape) == 2 and config["attention_bias" if part.startswith("attn") else "mlp_bias"]
        if biased:
            placements.append(Placement(f"{source}.bias", f"{target}.bias", shape[:1], rotary_heads=heads))
    return placements


def _refuse_unsupported(header: GgufHeader, head_size: int) -> None:
    rotated = count_or(header, "llama.rope.dimension_count", head_size)
    value_size = count_or(header, "llama.attention.value_length", head_size)
    problems = {
        "experts (llama.expert_count)": header.metadata.get("llama.expert_count", 0) != 0,
        f"rotary positions on {rotated} of {head_size} dimensions": rotated != head_size,
        f"value heads of size {value_size} with key heads of size {head_size}": value_size != head_size,
        "an odd head size": head_size % 2 == 1,
    }
    for what, present in problems.items():
        if present:
            raise Incompatible(f"{header.path}: not supported in a Llama model: {what}", path=header.path, what=what)


PERIOD = 6
LOCAL_BASE = 10000.0
# Not stored in the file: scores are divided by √256 in every model size but the largest, which divides by √168.
SCALARS = {62: 168}
NAMES = LAYER_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the Gemma 3 text model in `header`.

    Raises Incompatible for unsupported features and CheckpointInvalid for missing or invalid metadata.
    """
    heads = header.count("gemma3.attention.head_count")
    size = count_or(header, "gemma3.attention.key_length", 256)
    layers = layer_count(header)
    if count_or(header, "gemma3.attention.value_length", size) != size:
        raise Incompatible(
            f"{header.path}: not supported in a Gemma model: value heads that differ in size from the key heads"
        )
    key_value_heads = count_or(header, "gemma3.attention.head_count_kv", heads)
    if heads % key_value_heads:
        raise CheckpointInvalid.of(
            header.path, f"{heads} query heads are not a multiple of {key_value_heads} key/value heads"
        )
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "dtype": "bfloat16",
        "final_logit_softcapping": None,
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": header.count("gemma3.embedding_length"),
        "intermediate_size": header.count("gemma3.feed_forward_length"),
        "layer_types": ["sliding_attention" if (i + 1) % PERIOD else "full_attention" for i in range(layers)],
        "max_position_embeddings": header.count("gemma3.context_length"),
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_value_heads,
        "query_pre_attn_scalar": SCALARS.get(layers, 256),
        "rms_norm_eps": shortest_float32(header.number("gemma3.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"full_attention": _full_rope(header), "sliding_attention": _local_rope()},
        "sliding_window": header.count("gemma3.attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": vocabulary_size(header),
    }


def gemma2_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the Gemma 2 model in `header`; raises as `gemma_config`."""
    heads, width, layers = header.count("gemma2.attention.head_count"), header.count(WIDTH_2), layer_count(header)
    size = count_or(header, "gemma2.attention.key_length", 256)
    if count_or(header, "gemma2.attention.value_length", size) != size:
        raise Incompatible(
            f"{header.path}: not supported in a Gemma model: value heads that differ in size from the key heads"
        )
    kind = header.metadata.get("gemma2.rope.scaling.type", "none")
    if kind != "none":
        raise Incompatible(f"{header.path}: not supported in a Gemma model: rotary scaling {kind!r}")
    caps = {key: header.number(f"gemma2.{key}") for key in CAPS}
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "dtype": "bfloat16",
        **caps,
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": width,
        "intermediate_size": header.count("gemma2.feed_forward_length"),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": header.count("gemma2.context_length"),
        "model_type": "gemma2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": count_or(header, "gemma2.attention.head_count_kv", heads),
        # Not stored in the file: only the largest model, with 46 layers, does not divide scores by √head_dim.
        "query_pre_attn_scalar": width // heads if layers == LARGEST_2 else size,
        "rms_norm_eps": shortest_float32(header.number("gemma2.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shortest_float32(number_or(header, "gemma2.rope.freq_base", 10000.0)),
        },
        "sliding_window": header.count("gemma2.attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": vocabulary_size(header),
    }


WIDTH_2, LARGEST_2 = "gemma2.embedding_length", 46
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma_placements(header: GgufHeader, config: dict[str, Any]) -> list[Placement]:
    """A placement for every tensor of the file; raises CheckpointInvalid naming one that does not fit."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    placements = [
        Placement("token_embd.weight", OUTER_NAMES["token_embd.weight"], (vocabulary, width)),
        Placement("output_norm.weight", OUTER_NAMES["output_norm.weight"], (width,), subtracted=1.0),
    ]
    if not config["tie_word_embeddings"]:
        placements.append(Placement("output.weight", OUTER_NAMES["output.weight"], (vocabulary, width)))
    for layer in range(config["num_hidden_layers"]):
        for part, shape in _layer_shapes(config).items():
            target = f"model.layers.{layer}.{NAMES[part]}.weight"
            # GGUF stores the gain of a norm, Hugging Face the gain minus one.
            subtracted = 1.0 if len(shape) == 1 else 0.0
            placements.append(Placement(f"blk.{layer}.{part}.weight", target, shape, subtracted=subtracted))
    return matched(header, placements, f"Gemma {config['model_type'][5]}")


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    gains: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (width,)
    )
    if config["model_type"] == "gemma2":
        return matrices | gains
    return matrices | gains | dict.fromkeys(("attn_q_norm", "attn_k_norm"), (size,))


def _full_rope(header: GgufHeader) -> dict[str, Any]:
    base = shortest_float32(number_or(header, "gemma3.rope.freq_base", 1e6))
    kind = header.metadata.get("gemma3.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": header.number("gemma3.rope.scaling.factor"), "rope_theta": base}
    if kind != "none":
        raise Incompatible(f"{header.path}: not supported in a Gemma model: rotary scaling {kind!r}")
    return {"rope_type": "default", "rope_theta": base}


def _local_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": LOCAL_BASE}


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
    uses beside `READ`, `passed` further keys that have no effect with these values.
    """

    name: str
    config: Callable[[GgufHeader], dict[str, Any]]
    placements: Callable[[GgufHeader, dict[str, Any]], list[Placement]]
    read: frozenset[str]
    passed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


ARCHITECTURES = {
    "gemma2": GgufArchitecture(
        "gemma2", gemma2_config, gemma_placements, frozenset({"attention.sliding_window", "vocab_size", *CAPS})
    ),
    "llama": GgufArchitecture(
        "llama",
        llama_config,
        llama_placements,
        frozenset({"expert_count", "rope.dimension_count", "vocab_size", "rope.scaling.factor"})
        | {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"},
    ),
    "gemma3": GgufArchitecture(
        "gemma3",
        gemma_config,
        gemma_placements,
        frozenset({"attention.sliding_window", "rope.scaling.factor", "vocab_size", "mm.tokens_per_image"}),
        {"attention.sliding_window_pattern": (PERIOD,), "rope.freq_base_swa": (LOCAL_BASE,)},
    ),
}


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
