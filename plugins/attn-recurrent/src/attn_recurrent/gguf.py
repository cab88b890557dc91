"""GGUF files of LFM2, Qwen3-Next, Qwen3.5 and RWKV-7, whose layers have attention or a state of fixed size."""

from __future__ import annotations

import math

from attn_core.errors import Incompatible
from attn_models.weights.gguf_architectures import Part, Placement, count_or, layer_count, vocabulary_size
from attn_models.weights.gguf_families import EXPERTS, TURNED, GgufFamily, Keys, experts, first_tensor, number
from attn_models.weights.gguf_reader import GgufHeader

from attn_recurrent.lfm2 import CONV, FULL
from attn_recurrent.qwen3_5 import LINEAR

DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "out_proj.weight": "ssm_out.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
}
"""The tensors of a Gated DeltaNet, and their names in a GGUF file."""
WITH_QUERIES = ("in_proj_qkv.weight", "conv1d.weight")
STATES = frozenset(
    f"ssm.{word}" for word in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


def _lfm2(header: GgufHeader) -> Keys:
    counts = header.integers("lfm2.attention.head_count_kv")
    return {
        "layer_types": [FULL if count else CONV for count in counts],
        "conv_L_cache": header.count("lfm2.shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _qwen35(header: GgufHeader) -> Keys:
    """The kinds of layers and the sizes of Gated DeltaNet; texts have one position, whatever the sections of images."""
    name = header.text("general.architecture")
    values, inner = header.count(f"{name}.ssm.time_step_rank"), header.count(f"{name}.ssm.inner_size")
    listed = header.metadata.get(f"{name}.attention.recurrent_layers")
    period, layers = count_or(header, f"{name}.full_attention_interval", 4), layer_count(header)
    if not isinstance(listed, tuple):
        listed = tuple((layer + 1) % period != 0 for layer in range(layers))
    if inner % values:
        raise Incompatible(f"{header.path}: a state of {inner} values for {values} heads", path=header.path)
    return {
        "layer_types": [LINEAR if recurrent else FULL for recurrent in listed[:layers]],
        "linear_conv_kernel_dim": header.count(f"{name}.ssm.conv_kernel"),
        "linear_key_head_dim": header.count(f"{name}.ssm.state_size"),
        "linear_num_key_heads": header.count(f"{name}.ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
    }


def _qwen35_place(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:  # noqa: ARG001
    """The tensors of Gated DeltaNet. The heads of values that share a key are apart in a GGUF file."""
    before, found, leaf = theirs.partition(".linear_attn.")
    if not found:
        return None
    source, keys = f"blk.{before.rpartition('.')[2]}.{DELTA[leaf]}", config["linear_num_key_heads"]
    start = 2 * keys * config["linear_key_head_dim"] if leaf in WITH_QUERIES else 0
    tiled = (int(leaf == "out_proj.weight"), start, keys, config["linear_num_value_heads"] // keys)
    parts = (Part(source, (shape[0], shape[-1])),) if leaf == "conv1d.weight" else ()
    ordered = () if leaf == "norm.weight" else tiled
    return Placement(source, theirs, shape, parts=parts, decay=leaf == "A_log", tiled=ordered)


def _qwen3_next_place(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:
    """The projections of Gated DeltaNet: files have all queries, all keys, all values and, apart, all gates; older ones
    have the tensor of Hugging Face, with those of each key head."""
    before, found, _ = theirs.partition(".linear_attn.in_proj_qkvz.")
    block = f"blk.{before.rpartition('.')[2]}."
    if not found or f"{block}ssm_in.weight" in header.tensors:
        return None
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    parts = (
        Part(f"{block}attn_qkv.weight", (2 * keys + values, shape[1])),
        Part(f"{block}attn_gate.weight", (values, shape[1])),
    )
    rows = (keys, keys, values, values)
    return Placement(parts[0].source, theirs, shape, parts=parts, fused=rows, groups=config["linear_num_key_heads"])


def _qwen35_moe(header: GgufHeader) -> Keys:
    shared = first_tensor(header, "ffn_up_shexp")[0]
    return _qwen35(header) | experts(header) | {"shared_expert_intermediate_size": shared}


QWEN35 = TURNED | STATES | {"rope.dimension_sections", "attention.recurrent_layers", "full_attention_interval"}
FUSED_MIXES = [f"attn.x_{letter}" for letter in "rwkvag"]
"""The mixes of a layer in the order of their rows."""
RWKV7 = frozenset(
    {"wkv.head_size", "attention.layer_norm_epsilon"}
    | {f"attention.{name}_lora_rank" for name in ("decay", "iclr", "value_residual_mix", "gate")}
)
PROJECTIONS = {"r": "receptance", "k": "key", "v": "value", "o": "output"}
NETWORK = {"0.weight": "1.weight", "2.weight": "2.weight", "2.bias": "0.weight"}
RWKV7_TENSORS = {
    "model.embeddings.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    **{f"model.norm.{leaf}": f"output_norm.{leaf}" for leaf in ("weight", "bias")},
    **{f"pre_norm.{leaf}": f"token_embd_norm.{leaf}" for leaf in ("weight", "bias")},
    **{f"attn_norm.{leaf}": f"attn_norm.{leaf}" for leaf in ("weight", "bias")},
    **{f"ffn_norm.{leaf}": f"attn_norm_2.{leaf}" for leaf in ("weight", "bias")},
    **{f"attn.g_norm.{leaf}": f"time_mix_ln.{leaf}" for leaf in ("weight", "bias")},
    **{f"attn.{letter}_proj.weight": f"time_mix_{name}.weight" for letter, name in PROJECTIONS.items()},
    **{f"attn.{n}_lora.lora.{leaf}": f"time_mix_{n}{own}" for n in "wavg" for leaf, own in NETWORK.items()},
    **{f"attn.{name}": f"time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")},
    "ffn.x_k": "channel_mix_lerp_k.weight",
    **{f"ffn.{name}.weight": f"channel_mix_{name}.weight" for name in ("key", "value")},
}
"""The tensors of RWKV-7 in fla's layout, and their names in a GGUF file: those of layers behind `blk.N.`."""


def _rwkv7(header: GgufHeader) -> Keys:
    """The config.json in fla's layout."""
    ranks = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}
    return {
        "model_type": "rwkv7",
        "vocab_size": vocabulary_size(header),
        "max_position_embeddings": header.count("rwkv7.context_length"),
        "hidden_size": header.count("rwkv7.embedding_length"),
        "intermediate_size": header.count("rwkv7.feed_forward_length"),
        "num_hidden_layers": layer_count(header),
        "head_dim": header.count("rwkv7.wkv.head_size"),
        "norm_eps": number(header, "rwkv7.attention.layer_norm_epsilon"),
        "norm_first": True,
        **{f"{ours}_low_rank_dim": header.count(f"rwkv7.attention.{key}_lora_rank") for ours, key in ranks.items()},
    }


def _rwkv7_place(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:  # noqa: ARG001
    """The tensors of a layer; the mixes of its inputs are in one, and its bonuses have one axis."""
    if theirs in RWKV7_TENSORS:
        return Placement(RWKV7_TENSORS[theirs], theirs, shape)
    layer, _, leaf = theirs.removeprefix("model.layers.").partition(".")
    if leaf in FUSED_MIXES:
        return Placement(f"blk.{layer}.time_mix_lerp_fused.weight", theirs, shape, expert=FUSED_MIXES.index(leaf))
    name = RWKV7_TENSORS[leaf]
    source = name if leaf.startswith("pre_norm") else f"blk.{layer}.{name}"
    parts = (Part(source, (math.prod(shape),), view=shape),) if leaf == "attn.r_k" else ()
    return Placement(source, theirs, shape, parts=parts)


GGUF_FAMILIES = (
    GgufFamily("rwkv7", "rwkv7", read=RWKV7, passed={"token_shift_count": (2,)}, described=_rwkv7, placed=_rwkv7_place),
    GgufFamily("lfm2", "lfm2", _lfm2, read=TURNED | {"shortconv.l_cache"}),
    GgufFamily(
        "qwen3next",
        "qwen3_next",
        _qwen35_moe,
        read=QWEN35 | EXPERTS | {"expert_shared_feed_forward_length"},
        placed=_qwen3_next_place,
        tensors={"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"},
    ),
    GgufFamily("qwen35", "qwen3_5_text", _qwen35, read=QWEN35, placed=_qwen35_place),
    GgufFamily(
        "qwen35moe",
        "qwen3_5_moe_text",
        _qwen35_moe,
        read=QWEN35 | EXPERTS | {"expert_shared_feed_forward_length"},
        placed=_qwen35_place,
    ),
)
